//! As much HTTP as a load test needs: one request a connection, read as it comes, dropped when it should be.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A reply that takes longer is lost.
const PATIENCE: Duration = Duration::from_secs(120);

/// A reply, its body still to be read.
pub(super) struct Reply {
    pub(super) status: u16,
    body: Body,
}

struct Body {
    reader: BufReader<TcpStream>,
    chunked: bool,
    /// Bytes left of a chunk.
    left: usize,
}

/// Sends a request and does not wait.
pub(super) fn send(server: SocketAddr, method: &str, path: &str, body: &str) -> Result<TcpStream> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {server}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    send_raw(server, head.as_bytes())
}

/// Sends bytes that need not be a request.
pub(super) fn send_raw(server: SocketAddr, bytes: &[u8]) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(server).context("the server does not accept")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    // A server that refuses early may close before it has read everything.
    stream.write_all(bytes).ok();
    Ok(stream)
}

/// Waits for the head of the reply.
pub(super) fn receive(stream: TcpStream) -> Result<Reply> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).context("no reply came")?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.with_context(|| format!("{line:?} is no status line"))?;
    let mut chunked = false;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        if line.trim_end().is_empty() {
            return Ok(Reply { status, body: Body { reader, chunked, left: 0 } });
        }
        chunked |= line.to_ascii_lowercase().starts_with("transfer-encoding: chunked");
    }
}

impl Reply {
    pub(super) fn text(mut self) -> Result<String> {
        let mut text = String::new();
        self.body.read_to_string(&mut text)?;
        Ok(text)
    }

    pub(super) fn json(self) -> Result<Value> {
        Ok(serde_json::from_str(&self.text()?)?)
    }

    /// Gives every event of a stream to `take`, until it returns false or the stream has ended as it should.
    pub(super) fn events(self, mut take: impl FnMut(Value) -> Result<bool>) -> Result<()> {
        for line in BufReader::new(self.body).lines() {
            let line = line?;
            match line.strip_prefix("data: ") {
                Some("[DONE]") => return Ok(()),
                Some(json) if !take(serde_json::from_str(json)?)? => return Ok(()),
                _ => {}
            }
        }
        bail!("a stream ended without [DONE]")
    }
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if !self.chunked {
            return self.reader.read(buffer);
        }
        if self.left == 0 {
            let mut line = String::new();
            self.reader.read_line(&mut line)?;
            let size = usize::from_str_radix(line.trim(), 16).map_err(|_| std::io::ErrorKind::InvalidData)?;
            if size == 0 {
                return Ok(0);
            }
            // The line break after the data belongs to the chunk.
            self.left = size + 2;
        }
        if self.left <= 2 {
            let mut end = [0; 2];
            self.reader.read_exact(&mut end[..self.left])?;
            self.left = 0;
            return self.read(buffer);
        }
        let n = buffer.len().min(self.left - 2);
        let n = self.reader.read(&mut buffer[..n])?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= n;
        Ok(n)
    }
}
