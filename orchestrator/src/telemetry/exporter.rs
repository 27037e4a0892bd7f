//! Serves the page of metrics over HTTP, to any number of clients, each with a timeout of seconds.

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use metrics_exporter_prometheus::PrometheusHandle;
use ryzanstein_process_group::{AdmissionToken, HalfOpen, RuntimeThread};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// Timeout of a client to send its request and to read the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum length of a request, in bytes.
const LONGEST: usize = 8 << 10;
/// Interval at which the recorder folds its samples.
const UPKEEP: Duration = Duration::from_secs(5);

/// Listens at an address.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves on a separate thread until the process ends. Returns the address.
pub(super) fn serve(listener: TcpListener, page: PrometheusHandle) -> io::Result<SocketAddr> {
    let address = listener.local_addr()?;
    let runtime = RuntimeThread::start("ryz-metrics")?.detach();
    let fold = page.clone();
    runtime.spawn(async move {
        loop {
            sleep(UPKEEP).await;
            fold.run_upkeep();
        }
    });
    let listener = {
        // A tokio listener belongs to the runtime in whose context it is created.
        let _context = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    runtime.spawn(async move { accept(listener, &page).await });
    Ok(address)
}

async fn accept(listener: tokio::net::TcpListener, page: &PrometheusHandle) {
    let mut clients = HalfOpen::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let page = page.clone();
                let task = tokio::spawn(async move {
                    // A client that disconnects, or takes too long, gets nothing.
                    let _ = timeout(PATIENCE, answer(stream, page)).await;
                });
                clients.push(task.abort_handle(), AdmissionToken::default()).await;
            }
            Err(error) => {
                // Most likely the process has no descriptors left: make room, and do not spin.
                clients.shed("the metrics port", &error);
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Answers one request.
async fn answer(stream: TcpStream, page: PrometheusHandle) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        ready(Ok::<_, Infallible>(response(request.method(), request.uri().path(), &page)))
    });
    http1::Builder::new()
        .keep_alive(false)
        // A client may send nothing more, and still read.
        .half_close(true)
        .max_buf_size(LONGEST)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

fn response(method: &Method, path: &str, page: &PrometheusHandle) -> Response<String> {
    let (status, body) = match (method, path) {
        (&Method::GET | &Method::HEAD, "/" | "/metrics") => (StatusCode::OK, page.render()),
        (&Method::GET | &Method::HEAD, _) => (StatusCode::NOT_FOUND, "metrics are at /metrics\n".into()),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "expected GET /metrics\n".into()),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let format = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, format);
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpStream};

    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn asked(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // The server may answer and close before it has read all: the answer counts.
        let mut page = Vec::new();
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut page);
        String::from_utf8(page).unwrap()
    }

    #[test]
    fn clients_that_say_nothing_keep_nobody_from_the_page_and_are_hung_up_on() {
        let handle = PrometheusBuilder::new().build_recorder().handle();
        let address = serve(bind(([127, 0, 0, 1], 0).into()).unwrap(), handle).unwrap();
        let idle: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
        let page = asked(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
        assert!(asked(address, "GET /metrics?a=b HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        assert!(asked(address, "GET /x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(asked(address, "HEAD / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        assert!(asked(address, "POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(asked(address, "no request\r\n\r\n").starts_with("HTTP/1.1 400"));
        let endless = format!("GET / HTTP/1.1\r\nx: {}", "x".repeat(2 * LONGEST));
        assert!(asked(address, &endless).starts_with("HTTP/1.1 431"));
        for mut idle in idle {
            idle.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0, "hung up on");
        }
    }
}
