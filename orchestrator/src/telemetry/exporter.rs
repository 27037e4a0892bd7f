//! Serves the page of metrics over HTTP, to any number of clients, each with a timeout of seconds.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;
use ryzanstein_process_group::{AdmissionToken, HalfOpen, RuntimeThread};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
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
                    let _ = timeout(PATIENCE, answer(stream, &page)).await;
                });
                clients.push(task.abort_handle(), AdmissionToken::default()).await;
            }
            Err(error) => {
                // Most likely the process has no descriptors left: make room, and do not spin.
                tracing::debug!(%error, "the metrics port could not accept a connection");
                clients.shed();
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn answer(mut stream: TcpStream, page: &PrometheusHandle) -> io::Result<()> {
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST {
        match stream.read(&mut piece).await? {
            0 => return Ok(()),
            bytes => request.extend_from_slice(&piece[..bytes]),
        }
    }
    let line =
        String::from_utf8_lossy(request.split(|byte| *byte == b'\r').next().unwrap_or_default()).into_owned();
    let mut words = line.split(' ');
    // The request target after the path makes no difference.
    let path = |target: &'_ str| target.split('?').next().unwrap_or_default().to_owned();
    let (status, body) = match (words.next(), words.next().map(path).as_deref()) {
        (Some("GET"), Some("/" | "/metrics")) => ("200 OK", page.render()),
        (Some("GET"), Some(_)) => ("404 Not Found", "metrics are at /metrics\n".into()),
        _ => ("400 Bad Request", "expected GET /metrics\n".into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn asked(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
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
        assert!(asked(address, "POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 400"));
        assert!(asked(address, &"x".repeat(LONGEST)).starts_with("HTTP/1.1 400"));
        for mut idle in idle {
            idle.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0, "hung up on");
        }
    }
}
