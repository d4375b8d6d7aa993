//! A download that can be interrupted: bytes go to a file beside the target, which gets its name when size and SHA-256
//! are right. The part's name begins with the hash, so a part of another version is never gone on with.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use ureq::Agent;

const BUFFER_BYTES: usize = 1 << 20;
/// Left free on the disk: a full one breaks more than a download.
const SPARE_BYTES: u64 = 64 << 20;
const PART: &str = ".part";

/// A file somewhere else.
pub(super) struct Remote {
    pub(super) url: String,
    /// Sent to the first server only.
    pub(super) token: Option<String>,
    pub(super) size: u64,
    /// In lower-case hexadecimal.
    pub(super) sha256: String,
}

/// Why a file was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The server cannot be reached.
    #[error("{url} cannot be reached")]
    Request {
        /// Of what.
        url: String,
        /// Why.
        source: ureq::Error,
    },
    /// The server said no.
    #[error("{url}: the server says {status}{}", hint(*status))]
    Status {
        /// Of what.
        url: String,
        /// Its status.
        status: u16,
    },
    /// Nobody says what the file has to be.
    #[error("{url}: the server states no size and SHA-256, so the file could not be checked")]
    NoHash {
        /// Of what.
        url: String,
    },
    /// The disk is too small.
    #[error("{path} needs {:.1} GiB, {:.1} GiB are free", gib(*needed), gib(*free), path = path.display())]
    DiskFull {
        /// Where to.
        path: PathBuf,
        /// Bytes still to come.
        needed: u64,
        /// Bytes there are.
        free: u64,
    },
    /// Another process is at it.
    #[error("{path} is being fetched by another process", path = path.display())]
    Locked {
        /// The part.
        path: PathBuf,
    },
    /// The connection ended early.
    #[error("the download stopped after {have} of {size} bytes; repeat the command to go on from there")]
    Interrupted {
        /// Bytes that are here.
        have: u64,
        /// Bytes of the whole.
        size: u64,
        /// What happened, if it was not simply the end.
        source: Option<io::Error>,
    },
    /// More came than was announced.
    #[error("{url}: the server sends more than the {size} bytes it announced")]
    TooLong {
        /// Of what.
        url: String,
        /// Bytes announced.
        size: u64,
    },
    /// The bytes are not those that were promised.
    #[error("{url}: SHA-256 is {found}, not {wanted}; what came was removed")]
    Hash {
        /// Of what.
        url: String,
        /// Of the file that came.
        found: String,
        /// Of the file that was to come.
        wanted: String,
    },
    /// A file could not be read or written.
    #[error("{path}", path = path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 => " (files that are not for everyone need HF_TOKEN)",
        404 => " (there is no such file)",
        _ => "",
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> FetchError + use<> {
    let path = path.to_owned();
    move |source| FetchError::File { path: path.clone(), source }
}

/// Whether a file is an unfinished download of another.
pub(super) fn is_part_of(name: &str, whole: &str) -> bool {
    name.strip_prefix(whole).is_some_and(|rest| rest.starts_with('.') && rest.ends_with(PART))
}

/// Fetches a file, or the rest of it.
pub(super) fn download(agent: &Agent, remote: &Remote, to: &Path) -> Result<(), FetchError> {
    let mut name = to.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}{PART}", &remote.sha256[..16]));
    let path = to.with_file_name(name);
    let file_error = file_error(&path);
    let mut part = OpenOptions::new().create(true).read(true).append(true).open(&path).map_err(&file_error)?;
    match part.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(FetchError::Locked { path }),
        Err(TryLockError::Error(source)) => return Err(file_error(source)),
    }
    let mut have = part.metadata().map_err(&file_error)?.len();
    if have > remote.size {
        part.set_len(0).map_err(&file_error)?;
        have = 0;
    }
    check_disk(&path, remote.size - have)?;
    let bar = progress(remote.size);
    let mut hash = Sha256::new();
    copy(&mut File::open(&path).map_err(&file_error)?, |bytes| {
        hash.update(bytes);
        bar.inc(bytes.len() as u64);
        Ok(())
    })
    .map_err(&file_error)?;
    if have < remote.size {
        receive(agent, remote, &mut part, &path, have, &mut hash, &bar)?;
    }
    part.sync_all().map_err(&file_error)?;
    bar.finish_and_clear();
    let found = hex(&hash.finalize());
    if found != remote.sha256 {
        fs::remove_file(&path).map_err(&file_error)?;
        return Err(FetchError::Hash { url: remote.url.clone(), found, wanted: remote.sha256.clone() });
    }
    fs::rename(&path, to).map_err(&file_error)
}

/// Appends the bytes from `have` on.
fn receive(
    agent: &Agent,
    remote: &Remote,
    part: &mut File,
    path: &Path,
    mut have: u64,
    hash: &mut Sha256,
    bar: &ProgressBar,
) -> Result<(), FetchError> {
    let mut request = agent.get(&remote.url);
    if let Some(token) = &remote.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if have > 0 {
        request = request.header("range", format!("bytes={have}-"));
    }
    let mut reply = request.call().map_err(|source| FetchError::Request { url: remote.url.clone(), source })?;
    let range = reply.headers().get("content-range").and_then(|range| range.to_str().ok());
    let goes_on = range.is_some_and(|range| range.starts_with(&format!("bytes {have}-")));
    match reply.status().as_u16() {
        206 if goes_on => {}
        // A server that knows no ranges sends everything.
        200 => {
            part.set_len(0).map_err(file_error(path))?;
            (*hash, have) = (Sha256::new(), 0);
            bar.set_position(0);
        }
        status => return Err(FetchError::Status { url: remote.url.clone(), status }),
    }
    let mut body = reply.body_mut().as_reader();
    let mut written = Ok(());
    let copied = copy(&mut body, |bytes| {
        have += bytes.len() as u64;
        if have > remote.size {
            written = Err(FetchError::TooLong { url: remote.url.clone(), size: remote.size });
        } else {
            written = part.write_all(bytes).map_err(file_error(path));
            hash.update(bytes);
            bar.inc(bytes.len() as u64);
        }
        if written.is_ok() { Ok(()) } else { Err(io::ErrorKind::Other.into()) }
    });
    if let Err(FetchError::TooLong { .. }) = written {
        fs::remove_file(path).map_err(file_error(path))?;
    }
    written?;
    match copied {
        Ok(()) if have == remote.size => Ok(()),
        copied => Err(FetchError::Interrupted { have, size: remote.size, source: copied.err() }),
    }
}

fn copy(from: &mut impl Read, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => take(&buffer[..n])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn check_disk(path: &Path, needed: u64) -> Result<(), FetchError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let free = fs4::available_space(folder).map_err(file_error(folder))?;
    if needed.saturating_add(SPARE_BYTES) > free {
        return Err(FetchError::DiskFull { path: folder.to_owned(), needed, free });
    }
    Ok(())
}

fn progress(size: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(size);
    let template = "{bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
