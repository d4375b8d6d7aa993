//! Connections: accepted up to a limit, closed when they dawdle, drained at the end.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;

/// Connections that are open at once; more wait in the system's queue.
const MAX_CONNECTIONS: usize = 1024;
/// Bytes of a request's head.
const MAX_HEADER_BYTES: usize = 32 << 10;
/// After a failed accept (no file handles left, say), time for things to get better.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long clients may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// To send the head of a request, counted from the end of the last one (so also how long an idle connection is
    /// kept), and to take something of a reply.
    pub(super) patience: Duration,
    /// To take the rest of their replies when the server ends.
    pub(super) drain: Duration,
}

/// Serves until `stop` becomes true; then finishes the replies under way.
pub(super) async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>, times: Times) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        tokio::select! {
            _ = async { stop.wait_for(|stop| *stop).await.is_ok() } => break,
            Some(_) = connections.join_next() => {}
            (permit, accepted) = next => match accepted {
                Ok((stream, _)) => {
                    let (router, stop) = (router.clone(), stop.clone());
                    connections.spawn(async move {
                        let _permit = permit;
                        connection(stream, router, stop, times.patience).await;
                    });
                }
                Err(e) => {
                    tracing::warn!("a connection could not be accepted: {e}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(times.drain, all).await.is_err() {
        tracing::warn!("some replies were not finished in time");
    }
}

async fn connection(stream: TcpStream, router: Router, mut stop: watch::Receiver<bool>, patience: Duration) {
    // Tokens are small and must not wait for each other. A socket that refuses is slower, not wrong.
    stream.set_nodelay(true).ok();
    let mut stream = Box::pin(TimeoutStream::new(stream));
    // Counts only while there is something to write and the client takes nothing of it.
    stream.as_mut().set_write_timeout_pinned(Some(patience));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(patience).max_buf_size(MAX_HEADER_BYTES);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    // In a block of its own, so that no guard of the channel lives on.
    let stopping = async { stop.wait_for(|stop| *stop).await.is_ok() };
    let result = tokio::select! {
        result = connection.as_mut() => result,
        _ = stopping => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = result {
        tracing::debug!("a connection ended: {e}");
    }
}

/// Waits until the process is asked to end.
pub(super) async fn asked_to_end() -> io::Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            result = tokio::signal::ctrl_c() => result,
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await
}
