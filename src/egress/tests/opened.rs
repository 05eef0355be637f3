//! TLS opened for a credential, with real TLS and real HTTP on both sides.

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A server of the outside for `name`, and its own certificate.
fn server(name: &str, alpn: &str) -> (TlsAcceptor, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let certificate = made.cert.der().clone();
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    (TlsAcceptor::from(Arc::new(config)), certificate)
}

/// A client that trusts the border and nobody else.
fn client(border: &Border, alpn: &str) -> TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(border.certificate().as_bytes()).unwrap())
        .unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    TlsConnector::from(Arc::new(config))
}

/// Gives back the credential that it saw, in a header, in its body, and in a trailer.
async fn echo(
    request: Request<Incoming>,
) -> Result<Response<impl hyper::body::Body<Data = Bytes, Error = io::Error>>, io::Error> {
    let seen = request.headers()[http::header::AUTHORIZATION].clone();
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-message", seen.clone());
    let frames = [
        Frame::data(Bytes::copy_from_slice(seen.as_bytes())),
        Frame::trailers(trailers),
    ];
    let body = StreamBody::new(futures::stream::iter(frames.map(Ok::<_, io::Error>)));
    Ok(Response::builder().header("x-echo", seen).body(body).unwrap())
}

/// One request through the border; the answer's header, body and trailer.
async fn through(
    alpn: &'static str,
    trusted: bool,
) -> (Arc<World>, http::StatusCode, Option<String>, String, Option<String>) {
    let (acceptor, certificate) = server("api.example.com", alpn);
    let (world, border) = bed(|settings| {
        with_credential(settings);
        settings.credentials[0].host = "api.example.com".parse().unwrap();
        settings.credentials[0].port = 443;
        let mut roots = rustls::RootCertStore::empty();
        if trusted {
            roots.add(certificate).unwrap();
        }
        settings.roots = Arc::new(roots);
    });
    assert!(border.opens(&HostName::parse(b"api.example.com").unwrap(), 443));
    let (mut near, inside) = tokio::io::duplex(64 << 10);
    let mut tasks = tokio::task::JoinSet::new();
    let serving = border.clone();
    tasks.spawn(async move { serving.serve_stream(Door::Http, inside).await });
    near.write_all(b"CONNECT api.example.com:443 HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    let mut established = [0; 39];
    near.read_exact(&mut established).await.unwrap();
    assert_eq!(&established, b"HTTP/1.1 200 Connection established\r\n\r\n");
    let far = world.arrived.lock().unwrap().pop().unwrap();
    tasks.spawn(async move {
        if let Ok(stream) = acceptor.accept(far).await {
            let service = hyper::service::service_fn(echo);
            match alpn {
                "h2" => {
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    builder.serve_connection(TokioIo::new(stream), service).await.ok();
                }
                _ => {
                    let builder = hyper::server::conn::http1::Builder::new();
                    builder.serve_connection(TokioIo::new(stream), service).await.ok();
                }
            }
        }
    });
    let name = ServerName::try_from("api.example.com").unwrap();
    let stream = TokioIo::new(client(&border, alpn).connect(name, near).await.unwrap());
    let request = Request::get("https://api.example.com/api/x").header("te", "trailers");
    let response = if alpn == "h2" {
        let request = request.body(Full::new(Bytes::new())).unwrap();
        let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
            .await
            .unwrap();
        tasks.spawn(async move { connection.await.unwrap_or_default() });
        sender.send_request(request).await.unwrap()
    } else {
        let request = request
            .uri("/api/x")
            .header("host", "api.example.com")
            .body(Full::new(Bytes::new()))
            .unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
        tasks.spawn(async move { connection.await.unwrap_or_default() });
        sender.send_request(request).await.unwrap()
    };
    let text = |value: &http::HeaderValue| value.to_str().unwrap().to_owned();
    let (status, header) = (response.status(), response.headers().get("x-echo").map(text));
    let all = response.into_body().collect().await.unwrap();
    let trailer = all
        .trailers()
        .and_then(|trailers| trailers.get("grpc-message").map(text));
    let body = String::from_utf8(all.to_bytes().to_vec()).unwrap();
    tasks.abort_all();
    (world, status, header, body, trailer)
}

/// U1, T22: HTTP/2 with trailers (as gRPC has them) and HTTP/1, the value in and stars back.
#[tokio::test]
async fn a_credential_works_inside_of_tls() {
    let stars = format!("Bearer {}", "*".repeat(SECRET.len()));
    for (alpn, trailer) in [("h2", Some(stars.clone())), ("http/1.1", None)] {
        let (world, status, header, body, trailers) = through(alpn, true).await;
        assert_eq!(
            (status.as_u16(), header.as_ref(), &body),
            (200, Some(&stars), &stars),
            "{alpn}"
        );
        assert_eq!(trailers, trailer, "{alpn}");
        let decisions = world.decisions.lock().unwrap().clone();
        let seen: Vec<_> = decisions
            .iter()
            .map(|one| (one.outcome, one.method.as_deref(), one.credential.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [(Outcome::Allowed, Some("GET"), Some("token"))],
            "{alpn}: one decision, the request's"
        );
    }
}

/// The outside is verified always; the client hears it as an answer.
#[tokio::test]
async fn a_server_that_nobody_vouches_for_gets_nothing() {
    let (world, status, _, body, _) = through("http/1.1", false).await;
    assert_eq!(status.as_u16(), 502);
    assert!(body.contains("certificate"), "{body}");
    let decisions = world.decisions.lock().unwrap().clone();
    assert_eq!(
        decisions.iter().map(|one| one.outcome).collect::<Vec<_>>(),
        [Outcome::Failed]
    );
}
