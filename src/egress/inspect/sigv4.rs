//! AWS Signature Version 4 for a request that a client signed with a placeholder, or not at all.
//! <https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html>

use http::{HeaderMap, HeaderValue, Request, header};
use ring::{digest, hmac};
use time::OffsetDateTime;

use crate::clock::Timestamp;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const NO_BODY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

pub(super) struct Signer<'a> {
    pub access_key: &'a str,
    pub secret: &'a str,
    pub token: Option<&'a str>,
    pub region: &'a str,
    pub service: &'a str,
}

impl Signer<'_> {
    /// # Errors
    /// The client signed in a way that cannot be done anew: a sentence that says which.
    pub fn sign<B>(&self, request: &mut Request<B>, host: &str, now: Timestamp) -> Result<(), &'static str> {
        let query = request.uri().query().unwrap_or_default();
        if query
            .split('&')
            .any(|pair| pair.to_ascii_lowercase().starts_with("x-amz-signature"))
        {
            return Err("a presigned URL cannot be signed anew");
        }
        let payload = match request
            .headers()
            .get("x-amz-content-sha256")
            .map(|value| value.to_str())
        {
            Some(Ok(text)) if text.starts_with("STREAMING-AWS4") => {
                return Err("a body that is signed chunk by chunk cannot be signed anew");
            }
            Some(Ok(text)) => text.to_owned(),
            Some(Err(_)) => return Err("`x-amz-content-sha256` is no text"),
            None if request
                .headers()
                .get(header::CONTENT_LENGTH)
                .is_none_or(|length| length == "0")
                && [http::Method::GET, http::Method::HEAD, http::Method::DELETE].contains(request.method()) =>
            {
                NO_BODY.to_owned()
            }
            None => return Err("a body without `x-amz-content-sha256` cannot be signed anew"),
        };
        let now = OffsetDateTime::from_unix_timestamp(now.0 / 1000).map_err(|_| "the clock cannot be right")?;
        let (date, time) = (now.date(), now.time());
        let day = format!("{:04}{:02}{:02}", date.year(), u8::from(date.month()), date.day());
        let stamp = format!("{day}T{:02}{:02}{:02}Z", time.hour(), time.minute(), time.second());
        let value = |text: &str| HeaderValue::from_str(text).map_err(|_| "a part of it is no text");
        request.headers_mut().insert("x-amz-date", value(&stamp)?);
        if let Some(token) = self.token {
            let mut token = value(token)?;
            token.set_sensitive(true);
            request.headers_mut().insert("x-amz-security-token", token);
        }
        let scope = format!("{day}/{}/{}/aws4_request", self.region, self.service);
        let (names, canonical) = self.canonical(request, host, &payload);
        let to_sign = format!(
            "{ALGORITHM}\n{stamp}\n{scope}\n{}",
            hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref())
        );
        let first = secrecy::zeroize::Zeroizing::new(format!("AWS4{}", self.secret));
        let mut key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, first.as_bytes()), day.as_bytes());
        for part in [self.region, self.service, "aws4_request", &to_sign] {
            key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key.as_ref()), part.as_bytes());
        }
        let signature = hex(key.as_ref());
        let text = format!(
            "{ALGORITHM} Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
            self.access_key
        );
        request.headers_mut().insert(header::AUTHORIZATION, value(&text)?);
        Ok(())
    }

    /// The signed headers and the canonical request.
    fn canonical<B>(&self, request: &Request<B>, host: &str, payload: &str) -> (String, String) {
        let mut headers = signed(request.headers());
        headers.push(("host".to_owned(), host.to_owned()));
        headers.sort();
        let names = headers
            .iter()
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
            .join(";");
        let lines: String = headers
            .iter()
            .map(|(name, value)| format!("{name}:{value}\n"))
            .collect();
        // S3 takes the path as it is sent, the others escape it once more.
        let path = match self.service {
            "s3" => request.uri().path().to_owned(),
            _ => escaped(request.uri().path(), true),
        };
        let mut pairs: Vec<(&str, &str)> = request
            .uri()
            .query()
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .collect();
        pairs.sort_unstable();
        let query = pairs
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect::<Vec<_>>()
            .join("&");
        let method = request.method();
        let canonical = format!("{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}");
        (names, canonical)
    }
}

/// What the service itself needs signed, by lower-case name.
fn signed(headers: &HeaderMap) -> Vec<(String, String)> {
    let is_signed = |name: &str| name.starts_with("x-amz-") || name == "content-type" || name == "content-md5";
    let mut out: Vec<(String, String)> = Vec::new();
    for name in headers.keys().filter(|name| is_signed(name.as_str())) {
        let values = headers.get_all(name).iter().map(|value| {
            let text = String::from_utf8_lossy(value.as_bytes()).into_owned();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        });
        out.push((name.as_str().to_owned(), values.collect::<Vec<_>>().join(",")));
    }
    out
}

/// RFC 3986, 2.3; slashes stay where they are asked to.
pub(super) fn escaped(text: &str, slashes_stay: bool) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            b'/' if slashes_stay => "/".to_owned(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNER: Signer<'_> = Signer {
        access_key: "AKIDEXAMPLE",
        secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
        token: None,
        region: "us-east-1",
        service: "service",
    };

    /// 2015-08-30T12:36:00Z, the time of the published test suite.
    const THEN: Timestamp = Timestamp(1_440_938_160_000);

    fn signature(
        signer: &Signer<'_>,
        method: &str,
        target: &str,
        host: &str,
        then: Timestamp,
        headers: &[(&str, &str)],
    ) -> Result<String, &'static str> {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(()).unwrap();
        signer.sign(&mut request, host, then)?;
        let text = request.headers()[header::AUTHORIZATION].to_str().unwrap().to_owned();
        Ok(text.rsplit('=').next().unwrap().to_owned())
    }

    /// The signatures of AWS's own test suite (`get-vanilla`, `get-vanilla-query-order-key-case`, `post-vanilla`).
    #[test]
    fn it_signs_as_the_published_examples_do() {
        let sign = |method: &str, target: &str, headers: &[(&str, &str)]| {
            signature(&SIGNER, method, target, "example.amazonaws.com", THEN, headers).unwrap()
        };
        let vanilla = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31";
        assert_eq!(sign("GET", "/", &[]), vanilla);
        let query = "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500";
        assert_eq!(sign("GET", "/?Param2=value2&Param1=value1", &[]), query);
    }

    #[test]
    fn what_cannot_be_signed_anew_is_refused() {
        let sign = |method: &str, target: &str, headers: &[(&str, &str)]| {
            signature(&SIGNER, method, target, "a", THEN, headers)
        };
        assert!(sign("GET", "/?X-Amz-Signature=1", &[]).is_err());
        assert!(
            sign(
                "PUT",
                "/",
                &[("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")]
            )
            .is_err()
        );
        assert!(sign("POST", "/", &[("content-length", "5")]).is_err());
        assert!(sign("PUT", "/", &[("x-amz-content-sha256", "UNSIGNED-PAYLOAD")]).is_ok());
    }
}
