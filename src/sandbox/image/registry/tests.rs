//! Pulls from a registry that the test runs on loopback; it can stall, lie, break off and send too much.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;
use crate::sandbox::image::testing::{Image, Tar};
use crate::sandbox::image::{Bounds, Error as StoreError, Progress, StoredRef};

/// What is done with a request.
#[derive(Clone)]
enum Answer {
    Send(Vec<u8>),
    Head(&'static str, Vec<(&'static str, String)>),
    /// Promises all and sends half, then closes.
    HalfOf(Vec<u8>),
    /// Sends half and then nothing, for ever.
    Stall(Vec<u8>),
    /// Without a length, and without an end.
    Endless,
}

type Rule = dyn Fn(&Request, usize) -> Option<Answer> + Send + Sync;

struct Request {
    path: String,
    headers: HashMap<String, String>,
}

impl Request {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// A registry; its threads end with the sockets.
struct Registry {
    address: std::net::SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Registry {
    /// Has one image as `app:v1`; `rule` may answer first, given the request and how often its path was asked before.
    fn new(image: &Image, rule: impl Fn(&Request, usize) -> Option<Answer> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut files: HashMap<String, Vec<u8>> = HashMap::new();
        for bytes in image.blobs() {
            let digest = Digest::of(bytes);
            files.insert(format!("/v2/app/blobs/{digest}"), bytes.clone());
            files.insert(format!("/v2/app/manifests/{digest}"), bytes.clone());
        }
        files.insert("/v2/app/manifests/v1".to_owned(), image.manifest.clone());
        let (files, rule): (_, Arc<Rule>) = (Arc::new(files), Arc::new(rule));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (files, rule, log) = (Arc::clone(&files), Arc::clone(&rule), Arc::clone(&log));
                std::thread::spawn(move || serve(stream, &files, &*rule, &log));
            }
        });
        Self { address, seen }
    }

    fn honest(image: &Image) -> Self {
        Self::new(image, |_, _| None)
    }

    fn asked(&self, path: &str) -> usize {
        self.seen
            .lock()
            .unwrap()
            .iter()
            .filter(|seen| seen.contains(path))
            .count()
    }
}

fn serve(mut stream: TcpStream, files: &HashMap<String, Vec<u8>>, rule: &Rule, log: &Mutex<Vec<String>>) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines.by_ref().take_while(|line| !line.is_empty());
    let headers = headers.filter_map(|line| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_ascii_lowercase(), value.to_owned()))
    });
    let request = Request {
        headers: headers.collect(),
        path,
    };
    let before = {
        let mut log = log.lock().unwrap();
        let before = log.iter().filter(|seen| **seen == request.path).count();
        log.push(request.path.clone());
        before
    };
    let range = request
        .header("range")
        .strip_prefix("bytes=")
        .and_then(|range| range.strip_suffix('-')?.parse().ok());
    let found = files.get(&request.path).cloned();
    let answer = rule(&request, before).or(found.map(Answer::Send));
    let head = |status: &str, length: usize| {
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n")
    };
    let mut write = |bytes: &[u8]| stream.write_all(bytes).and_then(|()| stream.flush()).ok();
    match answer {
        None => write(head("404 Not Found", 0).as_bytes())?,
        Some(Answer::Send(bytes)) => {
            let (status, rest) = match range {
                Some(from) => ("206 Partial Content", &bytes[from..]),
                None => ("200 OK", bytes.as_slice()),
            };
            write(head(status, rest.len()).as_bytes())?;
            write(rest)?;
        }
        Some(Answer::Head(status, headers)) => {
            let headers: String = headers
                .iter()
                .map(|(name, value)| format!("{name}: {value}\r\n"))
                .collect();
            write(format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n").as_bytes())?;
        }
        Some(Answer::HalfOf(bytes)) => {
            write(head("200 OK", bytes.len()).as_bytes())?;
            write(&bytes[..bytes.len() / 2])?;
        }
        Some(Answer::Stall(bytes)) => {
            write(head("200 OK", bytes.len()).as_bytes())?;
            write(&bytes[..bytes.len() / 2])?;
            // Until the other side has had enough.
            let _ = std::io::Read::read(&mut stream, &mut [0]);
        }
        Some(Answer::Endless) => {
            write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
            while write(&[b' '; 64 << 10]).is_some() {}
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
    Some(())
}

fn image() -> Image {
    Image::new(&[
        Tar::new().file("a", &"one".repeat(1000)).bytes(),
        Tar::new().file("b", "two").bytes(),
    ])
}

fn options() -> Options {
    Options {
        plain_http: true,
        patience: Patience {
            idle: Duration::from_millis(300),
            pause: Duration::from_millis(1),
            ..Patience::default()
        },
        ..Options::default()
    }
}

struct Pulled {
    _data: tempfile::TempDir,
    store: Store,
    result: Result<Stored, StoreError>,
    told: Vec<Progress>,
}

impl Pulled {
    fn refusal(&self) -> String {
        let images = self.store.roots.images();
        let left: Vec<String> = super::super::names(images).unwrap();
        assert_eq!(
            left.iter()
                .filter(|name| name.starts_with(".scratch") || name.starts_with("root-"))
                .count(),
            0
        );
        assert_eq!(self.store.list().unwrap(), []);
        self.result.as_ref().unwrap_err().to_string()
    }

    fn file(&self, name: &str) -> String {
        let image: StoredRef = "app".parse().unwrap();
        fs::read_to_string(self.store.root(&image).unwrap().join(name)).unwrap()
    }
}

async fn pulled(registry: &Registry, reference: &str, options: &Options) -> Pulled {
    pulled_by(registry, reference, options, Job::default()).await
}

async fn pulled_by(registry: &Registry, reference: &str, options: &Options, job: Job) -> Pulled {
    let data = tempfile::tempdir().unwrap();
    let store = Store::open(data.path()).unwrap();
    let reference = super::reference(&format!("{}/{reference}", registry.address)).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&told);
    let job = job.watched(move |progress| log.lock().unwrap().push(progress));
    let result = pull(&store, &reference, options, &"app".parse().unwrap(), Timestamp(7), &job).await;
    drop(job);
    let told = told.lock().unwrap().clone();
    Pulled {
        _data: data,
        store,
        result,
        told,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_pulled_by_tag_and_by_digest() {
    let image = image();
    let registry = Registry::honest(&image);
    for reference in ["app:v1".to_owned(), format!("app@{}", image.digest())] {
        let pulled = pulled(&registry, &reference, &options()).await;
        assert_eq!(pulled.result.as_ref().unwrap().digest, image.digest());
        assert_eq!(pulled.file("b"), "two");
        let whole = Progress::Fetching {
            layer: 1,
            layers: 2,
            bytes: 0,
            of: 0,
        };
        let is_fetching = |told: &&Progress| std::mem::discriminant(*told) == std::mem::discriminant(&whole);
        assert!(pulled.told.iter().filter(is_fetching).count() >= 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_has_is_not_fetched_again() {
    let image = image();
    let registry = Registry::honest(&image);
    let first = pulled(&registry, "app:v1", &options()).await;
    first.result.as_ref().unwrap();
    let layer = Digest::of(&image.layers[0]).to_string();
    let before = registry.asked(&layer);
    let reference = reference(&format!("{}/app:v1", registry.address)).unwrap();
    let job = Job::default();
    pull(
        &first.store,
        &reference,
        &options(),
        &"other".parse().unwrap(),
        Timestamp(7),
        &job,
    )
    .await
    .unwrap();
    assert_eq!((before, registry.asked(&layer)), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_lies_about_digests_is_not_believed() {
    let image = image();
    // Each document or layer in turn is another, as long as what was promised.
    let flipped = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        bytes
    };
    for (bytes, what) in [
        (image.config.clone(), "the image's configuration is not what"),
        (image.layers[0].clone(), "layer `sha256:"),
        (image.layers[1].clone(), "layer `sha256:"),
    ] {
        let (path, lie) = (Digest::of(&bytes).to_string(), flipped(&bytes));
        let registry = Registry::new(&image, move |request, _| {
            request.path.contains(&path).then(|| Answer::Send(lie.clone()))
        });
        let pulled = pulled(&registry, "app:v1", &options()).await;
        let refusal = pulled.refusal();
        assert!(
            refusal.starts_with(what) && refusal.contains("is not what its digest says"),
            "{refusal}"
        );
    }
    // Asked by digest, another manifest; whatever its own header says.
    let other = Image::new(&[Tar::new().file("evil", "").bytes()]);
    let manifest = other.manifest.clone();
    let registry = Registry::new(&image, move |request, _| {
        request
            .path
            .contains("manifests")
            .then(|| Answer::Send(manifest.clone()))
    });
    let pulled = pulled(&registry, &format!("app@{}", image.digest()), &options()).await;
    assert!(pulled.refusal().starts_with("the manifest is not what its digest says"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_sends_too_much_is_cut_off() {
    let image = image();
    for (path, what) in [
        ("manifests/v1".to_owned(), "bytes as manifest `v1`"),
        (
            Digest::of(&image.config).to_string(),
            "bytes as the image's configuration",
        ),
        (Digest::of(&image.layers[1]).to_string(), "bytes as layer"),
    ] {
        let registry = Registry::new(&image, move |request, _| {
            request.path.contains(&path).then_some(Answer::Endless)
        });
        let refusal = pulled(&registry, "app:v1", &options()).await.refusal();
        assert!(refusal.contains(what), "{refusal}");
    }
    let registry = Registry::honest(&image);
    let job = Job {
        bounds: Bounds {
            bytes: 50,
            ..Bounds::default()
        },
        ..Job::default()
    };
    let pulled = pulled_by(&registry, "app:v1", &options(), job).await;
    assert_eq!(pulled.refusal(), "it holds more than 50 bytes");
    assert_eq!(registry.asked(&Digest::of(&image.layers[0]).to_string()), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn t15_a_registry_that_hangs_is_left_after_a_while() {
    let image = image();
    let layer = image.layers[0].clone();
    let path = Digest::of(&layer).to_string();
    let registry = Registry::new(&image, move |request, _| {
        request.path.contains(&path).then(|| Answer::Stall(layer.clone()))
    });
    let pulled = pulled(&registry, "app:v1", &options()).await;
    let refusal = pulled.refusal();
    assert!(refusal.contains("sent nothing more of layer"), "{refusal}");
    assert!(pulled.told.iter().any(|told| matches!(told, Progress::Retrying { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn t15_a_pull_that_takes_too_long_as_a_whole_ends() {
    let image = image();
    let manifest = image.manifest.clone();
    let registry = Registry::new(&image, move |request, _| {
        request
            .path
            .contains("manifests")
            .then(|| Answer::Stall(manifest.clone()))
    });
    let mut options = options();
    options.patience.idle = Duration::from_secs(3600);
    options.patience.total = Duration::from_millis(200);
    assert_eq!(
        pulled(&registry, "app:v1", &options).await.refusal(),
        "the pull took longer than 0.2 s"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn t15_cancelling_a_pull_works_at_once_and_leaves_nothing() {
    let image = image();
    let layer = image.layers[0].clone();
    let path = Digest::of(&layer).to_string();
    let job = Job::default();
    let cancel = job.cancel.clone();
    let registry = Registry::new(&image, move |request, _| {
        request.path.contains(&path).then(|| {
            cancel.cancel();
            Answer::Stall(layer.clone())
        })
    });
    let mut options = options();
    options.patience.idle = Duration::from_secs(3600);
    let pulled = pulled_by(&registry, "app:v1", &options, job).await;
    assert_eq!(pulled.refusal(), "cancelled");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_breaks_off_is_fetched_on_from_there() {
    let image = image();
    let layer = image.layers[0].clone();
    let path = Digest::of(&layer).to_string();
    let ranges = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&ranges);
    let half = layer.len() / 2;
    let registry = Registry::new(&image, move |request, before| {
        if !request.path.contains(&path) {
            return None;
        }
        log.lock().unwrap().push(request.header("range").to_owned());
        (before == 0).then(|| Answer::HalfOf(layer.clone()))
    });
    let pulled = pulled(&registry, "app:v1", &options()).await;
    pulled.result.as_ref().unwrap();
    assert_eq!(pulled.file("a"), "one".repeat(1000));
    assert_eq!(*ranges.lock().unwrap(), [String::new(), format!("bytes={half}-")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_that_pass_are_tried_again_and_others_are_not() {
    let image = image();
    let registry = Registry::new(&image, |request, before| {
        let is_first = request.path.contains("manifests") && before < 2;
        is_first.then(|| Answer::Head("503 Service Unavailable", vec![("Retry-After", "0".to_owned())]))
    });
    pulled(&registry, "app:v1", &options()).await.result.unwrap();
    assert_eq!(registry.asked("manifests/v1"), 3);
    let refusal = pulled(&registry, "app:v2", &options()).await.refusal();
    assert!(refusal.ends_with("has no manifest `v2`"), "{refusal}");
    let registry = Registry::new(&image, |_, _| Some(Answer::Head("500 Internal Server Error", vec![])));
    let refusal = pulled(&registry, "app:v1", &options()).await.refusal();
    assert!(refusal.ends_with("answered 500 for manifest `v1`"), "{refusal}");
    assert_eq!(registry.asked("manifests/v1"), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_goes_to_the_token_service_and_the_token_to_the_registry() {
    let image = image();
    let registry = Registry::new(&image, |request, _| {
        let own = request.header("host").to_owned();
        if request.path.starts_with("/token?") {
            let fits = request.path.contains("scope=repository%3Aapp%3Apull") && request.path.contains("service=me");
            // me:hunter2
            return Some(match (fits, request.header("authorization")) {
                (true, "Basic bWU6aHVudGVyMg==") => Answer::Send(br#"{"token":"t-1","expires_in":300}"#.to_vec()),
                _ => Answer::Head("401 Unauthorized", vec![]),
            });
        }
        let challenge = format!(r#"Bearer realm="http://{own}/token",service="me""#);
        let is_in = request.header("authorization") == "Bearer t-1";
        (!is_in).then(|| Answer::Head("401 Unauthorized", vec![("WWW-Authenticate", challenge)]))
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(
        file.path(),
        json!({ "auths": { registry.address.to_string(): { "auth": "bWU6aHVudGVyMg==" } } }).to_string(),
    )
    .unwrap();
    let with = |login: Login| Options { login, ..options() };
    let pulled_in = pulled(&registry, "app:v1", &with(Login::DockerConfig(file.path().to_owned()))).await;
    pulled_in.result.as_ref().unwrap();
    assert_eq!(registry.asked("/token"), 1);
    let refusal = pulled(&registry, "app:v1", &options()).await.refusal();
    assert!(
        refusal.ends_with("does not let us have a token for manifest `v1` (401)"),
        "{refusal}"
    );
    let missing = Login::Token("env:EXUVIA_TEST_NO_SUCH".parse().unwrap());
    let refusal = pulled(&registry, "app:v1", &with(missing)).await.refusal();
    assert!(
        refusal.contains("credential `env:EXUVIA_TEST_NO_SUCH` is not set"),
        "{refusal}"
    );
    // Nothing of it is anywhere in the store.
    for entry in fs::read_dir(pulled_in.store.roots.images().join("records")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        assert!(!text.contains("hunter2") && !text.contains("t-1"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_does_not_take_the_token_along_and_leads_nowhere_without_tls() {
    let image = image();
    let layer = image.layers[0].clone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let sent = layer.clone();
    let elsewhere = Registry::new(&image, move |request, _| {
        log.lock().unwrap().push(request.header("authorization").to_owned());
        Some(Answer::Send(sent.clone()))
    });
    let path = Digest::of(&layer).to_string();
    let to = |target: String| {
        let path = path.clone();
        Registry::new(&image, move |request, _| {
            let is_in = request.header("authorization").starts_with("Basic ");
            if !is_in {
                let challenge = "Basic realm=\"x\"".to_owned();
                return Some(Answer::Head("401 Unauthorized", vec![("WWW-Authenticate", challenge)]));
            }
            request
                .path
                .contains(&path)
                .then(|| Answer::Head("307 Temporary Redirect", vec![("Location", target.clone())]))
        })
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "hunter2").unwrap();
    let with_login = Options {
        login: Login::Password {
            name: "me".to_owned(),
            password: format!("file:{}", file.path().display()).parse().unwrap(),
        },
        ..options()
    };
    let registry = to(format!("http://{}/layer", elsewhere.address));
    pulled(&registry, "app:v1", &with_login).await.result.unwrap();
    assert_eq!(*seen.lock().unwrap(), [""]);
    let registry = to("http://192.0.2.1/layer".to_owned());
    let refusal = pulled(&registry, "app:v1", &with_login).await.refusal();
    assert!(refusal.contains("it redirects to where there is no TLS"), "{refusal}");
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_is_for_loopback_and_only_when_asked_for() {
    let data = tempfile::tempdir().unwrap();
    let store = Store::open(data.path()).unwrap();
    let name = "x".parse().unwrap();
    for host in ["registry.example", "192.0.2.1:5000", "127.0.0.1.example"] {
        let reference = reference(&format!("{host}/app:v1")).unwrap();
        let refused = pull(&store, &reference, &options(), &name, Timestamp(7), &Job::default())
            .await
            .unwrap_err();
        assert!(
            matches!(refused, StoreError::Registry(Error::PlainHttp(_))),
            "{refused}"
        );
    }
    // Without the flag TLS is spoken, which this registry does not understand.
    let registry = Registry::honest(&image());
    let mut tls = options();
    tls.plain_http = false;
    let refused = pulled(&registry, "app:v1", &tls).await.refusal();
    assert!(refused.starts_with("could not get"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_platform_is_chosen_from_an_index() {
    let image = image();
    let architecture = Platform::default().architecture;
    let entry = |digest: &Digest, size: usize, architecture: &str, os: &str| {
        json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": size,
            "platform": { "os": os, "architecture": architecture } })
    };
    let index = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [
        entry(&Digest::of(b"note"), 4, "unknown", "unknown"),
        entry(&Digest::of(b"other"), 5, "s390x", "linux"),
        entry(&image.digest(), image.manifest.len(), &architecture, "linux"),
    ] });
    let index = index.to_string().into_bytes();
    let registry = Registry::new(&image, move |request, _| {
        request
            .path
            .ends_with("manifests/v1")
            .then(|| Answer::Send(index.clone()))
    });
    assert_eq!(
        pulled(&registry, "app:v1", &options()).await.result.unwrap().digest,
        image.digest()
    );
    let foreign = Options {
        platform: "linux/riscv64".parse().unwrap(),
        ..options()
    };
    let refusal = pulled(&registry, "app:v1", &foreign).await.refusal();
    let have = format!("`linux/s390x`, `linux/{architecture}`");
    assert_eq!(refusal, format!("it has no image for `linux/riscv64`, only for {have}"));
}

#[test]
fn references_and_the_names_they_give() {
    let name = |text: &str| default_name(&reference(text).unwrap()).unwrap().to_string();
    assert_eq!(name("debian:bookworm"), "debian:bookworm");
    assert_eq!(name("registry.example:5000/team/app"), "team/app:latest");
    let digest = Digest::of(b"x");
    assert_eq!(name(&format!("registry.example/team/app@{digest}")), "team/app");
    for bad in ["", "a/UPPER", "x@sha256:12", "x@sha512:00"] {
        assert!(matches!(reference(bad), Err(Error::Reference { .. })), "{bad}");
    }
}

/// TLS before a registry: with a certificate for `name` that `authority` signed.
fn behind_tls(registry: &Registry, name: &str, authority: &Authority) -> std::net::SocketAddr {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority.0).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    let (config, listener) = (Arc::new(config), TcpListener::bind("127.0.0.1:0").unwrap());
    let (address, inner) = (listener.local_addr().unwrap(), registry.address);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let config = Arc::clone(&config);
            std::thread::spawn(move || pass_on(stream, config, inner));
        }
    });
    address
}

/// One request and its answer.
fn pass_on(stream: TcpStream, config: Arc<rustls::ServerConfig>, inner: std::net::SocketAddr) -> std::io::Result<()> {
    let session = rustls::ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut tls = rustls::StreamOwned::new(session, stream);
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        std::io::Read::read_exact(&mut tls, &mut byte)?;
        request.extend(byte);
    }
    let mut plain = TcpStream::connect(inner)?;
    plain.write_all(&request)?;
    std::io::copy(&mut plain, &mut tls)?;
    tls.conn.send_close_notify();
    tls.flush()
}

struct Authority(rcgen::CertifiedIssuer<'static, rcgen::KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        Self(rcgen::CertifiedIssuer::self_signed(params, key).unwrap())
    }

    fn file(&self) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), self.0.pem()).unwrap();
        file
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn over_tls_only_who_is_trusted_is_believed() {
    let image = image();
    let registry = Registry::honest(&image);
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (our_file, their_file) = (ours.file(), theirs.file());
    let trusting = |file: Option<&tempfile::NamedTempFile>| Options {
        plain_http: false,
        authorities: file.map(|file| file.path().to_owned()),
        ..options()
    };
    let at = |address| Registry {
        address,
        seen: Arc::default(),
    };
    let good = at(behind_tls(&registry, "127.0.0.1", &ours));
    for reference in ["app:v1".to_owned(), format!("app@{}", image.digest())] {
        let pulled = pulled(&good, &reference, &trusting(Some(&our_file))).await;
        assert_eq!(pulled.result.as_ref().unwrap().digest, image.digest());
        assert_eq!(pulled.file("b"), "two");
    }
    // Not signed by whom we trust, and not for the name that we asked for; nothing is asked of the registry then.
    let elsewhere = at(behind_tls(&registry, "registry.example", &ours));
    let before = registry.asked("");
    for (at, file) in [(&good, None), (&good, Some(&their_file)), (&elsewhere, Some(&our_file))] {
        let pulled = pulled(at, "app:v1", &trusting(file)).await;
        let told = pulled.refusal();
        assert!(told.contains("has a certificate that is not to be trusted"), "{told}");
        assert_eq!(pulled.result.as_ref().unwrap_err().kind(), Kind::Denied);
        assert_eq!(pulled.told, [], "it is not tried again");
    }
    assert_eq!(registry.asked(""), before);
    // TLS says who sends it, not what is in it.
    let layer = Digest::of(&image.layers[1]).to_string();
    let lying = Registry::new(&image, move |request, _| {
        request.path.ends_with(&layer).then(|| Answer::Send(b"else".to_vec()))
    });
    let lying = at(behind_tls(&lying, "127.0.0.1", &ours));
    let told = pulled(&lying, "app:v1", &trusting(Some(&our_file))).await.refusal();
    assert!(told.contains("layer"), "{told}");
    // What is no certificate is said before anything is asked.
    let empty = tempfile::NamedTempFile::new().unwrap();
    let told = pulled(&good, "app:v1", &trusting(Some(&empty))).await.refusal();
    assert!(told.contains("holds no certificates"), "{told}");
}
