//! Web pages of other sites: what a browser on this machine may be made to do.
//!
//! CORS is off unless origins are named, so a page can neither send JSON nor read an answer. That leaves a page whose
//! own name is made to resolve to this machine ("DNS rebinding"): it is of the same origin, but calls the server by
//! that name. A server for this machine alone, without a key, therefore answers to names of this machine only.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowOrigin, CorsLayer};

use super::ServerOptions;
use super::error::ApiError;

/// What is let through.
#[derive(Clone)]
pub(super) struct Guard {
    /// `None`: any name.
    names: Option<Arc<[String]>>,
    pub(super) cors: Option<CorsLayer>,
}

impl Guard {
    pub(super) fn new(options: &ServerOptions, local: SocketAddr) -> Self {
        let alone = local.ip().to_canonical().is_loopback() && options.api_key.is_none();
        let names = alone.then(|| {
            let own = ["localhost".to_owned(), options.host.clone()];
            own.iter().chain(&options.names).map(|name| name.to_ascii_lowercase()).collect()
        });
        Self { names, cors: cors(&options.cors) }
    }

    fn knows(&self, host: &str) -> bool {
        let Some(names) = &self.names else { return true };
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        // An address cannot be made to mean another machine.
        name.parse::<IpAddr>().is_ok() || names.contains(&name)
    }
}

fn cors(origins: &[HeaderValue]) -> Option<CorsLayer> {
    let origin = if origins.is_empty() {
        return None;
    } else if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().cloned())
    };
    let methods = [Method::GET, Method::POST];
    Some(CorsLayer::new().allow_origin(origin).allow_methods(methods).allow_headers([CONTENT_TYPE, AUTHORIZATION]))
}

pub(super) async fn check_host(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    // HTTP/1.0 has no such header, and no browser speaks it.
    match request.headers().get(HOST) {
        Some(host) if !host.to_str().is_ok_and(|host| guard.knows(host)) => {
            let message = "this server does not go by that name; --allow-host NAME lets it";
            ApiError::client(StatusCode::MISDIRECTED_REQUEST, message).into_response()
        }
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_for_this_machine_goes_by_its_names() {
        let names: Arc<[String]> = ["localhost".to_owned(), "box.example".to_owned()].into();
        let guard = Guard { names: Some(names), cors: None };
        for (host, want) in [
            ("localhost:8080", true),
            ("LocalHost", true),
            ("127.0.0.1:8080", true),
            ("[::1]:8080", true),
            ("192.168.0.7", true),
            ("box.example:1", true),
            ("evil.example:8080", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("", false),
            ("a b", false),
        ] {
            assert_eq!(guard.knows(host), want, "{host}");
        }
        assert!(Guard { names: None, cors: None }.knows("evil.example"));
    }
}
