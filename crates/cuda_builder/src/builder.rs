//! The builder: options, then the steps in order.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use crate::link::{self, Flags, Module};
use crate::metadata::Package;
use crate::{Arch, Error, Toolchain, compile, ptx};

/// Builds a kernel crate; see the crate's example.
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    krate: PathBuf,
    archs: Vec<Arch>,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    out_dir: Option<PathBuf>,
    fma_contraction: bool,
    ftz: bool,
    fast_sqrt: bool,
    fast_div: bool,
}

/// What a build made.
#[derive(Clone, Debug)]
pub struct Built {
    /// One module a target, lowest target first.
    pub ptx: Vec<BuiltPtx>,
    /// The kernels, sorted by name.
    pub entries: Vec<String>,
    /// Every source file of the crate and of its path dependencies: a build script watches these.
    pub sources: Vec<PathBuf>,
    /// What compiled it.
    pub toolchain: Toolchain,
}

/// The module of one target.
#[derive(Clone, Debug)]
pub struct BuiltPtx {
    /// The target.
    pub arch: Arch,
    /// The PTX file.
    pub path: PathBuf,
}

impl CudaBuilder {
    /// A builder for the crate whose `Cargo.toml` is in `krate`.
    pub fn new(krate: impl AsRef<Path>) -> CudaBuilder {
        CudaBuilder {
            krate: krate.as_ref().to_owned(),
            archs: Vec::new(),
            copy_to: None,
            target_dir: None,
            out_dir: None,
            fma_contraction: true,
            ftz: false,
            fast_sqrt: false,
            fast_div: false,
        }
    }

    /// Adds a target. Without any, those in the crate's `[package.metadata.cuda_builder]` are built.
    pub fn arch(mut self, arch: Arch) -> CudaBuilder {
        self.archs.push(arch);
        self
    }

    /// Copies the PTX of the lowest target to `path`.
    pub fn copy_to(mut self, path: impl AsRef<Path>) -> CudaBuilder {
        self.copy_to = Some(path.as_ref().to_owned());
        self
    }

    /// Where cargo keeps its objects. The default is `ptx` in the crate's target folder, so that
    /// the build does not wait for a lock of the cargo that may have started it.
    pub fn target_dir(mut self, path: impl AsRef<Path>) -> CudaBuilder {
        self.target_dir = Some(path.as_ref().to_owned());
        self
    }

    /// Where PTX and linked bitcode go; `out` in the target folder by default.
    pub fn out_dir(mut self, path: impl AsRef<Path>) -> CudaBuilder {
        self.out_dir = Some(path.as_ref().to_owned());
        self
    }

    /// Whether `a * b + c` may become one `fma`; it may by default. Without it LLVM writes `mul.rn`
    /// and `add.rn`, which ptxas must not fuse either.
    pub fn fma_contraction(mut self, on: bool) -> CudaBuilder {
        self.fma_contraction = on;
        self
    }

    /// Whether single-precision denormals are flushed to zero; off by default.
    pub fn ftz(mut self, on: bool) -> CudaBuilder {
        self.ftz = on;
        self
    }

    /// Whether `sqrt` is the hardware's approximation; off by default.
    pub fn fast_sqrt(mut self, on: bool) -> CudaBuilder {
        self.fast_sqrt = on;
        self
    }

    /// Whether `/` is the hardware's approximation (2 ulp); off by default.
    pub fn fast_div(mut self, on: bool) -> CudaBuilder {
        self.fast_div = on;
        self
    }

    /// Finds a toolchain and builds.
    ///
    /// # Errors
    /// [`Error::NoToolchain`] where there is none; otherwise what the failing step reports.
    pub fn build(&self) -> Result<Built, Error> {
        self.build_with(&Toolchain::find()?)
    }

    /// Builds with a toolchain that was found before.
    ///
    /// # Errors
    /// What the failing step reports.
    pub fn build_with(&self, toolchain: &Toolchain) -> Result<Built, Error> {
        let package = Package::read(toolchain, &self.krate)?;
        let target_dir = self.target_dir.clone().unwrap_or_else(|| package.target_dir.join("ptx"));
        let out_dir = self.out_dir.clone().unwrap_or_else(|| target_dir.join("out"));
        fs::create_dir_all(&out_dir).map_err(Error::file(&out_dir))?;
        let bitcode = compile::compile(toolchain, &package, &target_dir)?;
        let module = link::link(toolchain, &bitcode, &out_dir)?;
        let ptx = self.emit_all(toolchain, &package, &module, &out_dir)?;
        if let (Some(copy), Some(lowest)) = (&self.copy_to, ptx.first()) {
            fs::copy(&lowest.path, copy).map_err(Error::file(copy))?;
        }
        let mut sources = bitcode.sources;
        sources.push(package.manifest);
        Ok(Built { ptx, entries: module.entries, sources, toolchain: toolchain.clone() })
    }

    /// Makes every target's PTX, each on its own thread.
    fn emit_all(
        &self,
        toolchain: &Toolchain,
        package: &Package,
        module: &Module,
        out_dir: &Path,
    ) -> Result<Vec<BuiltPtx>, Error> {
        let mut archs = if self.archs.is_empty() { package.archs.clone() } else { self.archs.clone() };
        if archs.is_empty() {
            archs.push(Arch::Sm80);
        }
        archs.sort_unstable();
        archs.dedup();
        let flags = self.flags(package);
        let emit = |arch: Arch| {
            let text = ptx::finish(&link::emit(toolchain, module, arch, &flags, out_dir)?, arch)?;
            let path = out_dir.join(format!("{}.{arch}.ptx", package.name));
            fs::write(&path, text).map_err(Error::file(&path))?;
            Ok(BuiltPtx { arch, path })
        };
        thread::scope(|scope| {
            let workers: Vec<_> = archs.iter().map(|&arch| scope.spawn(move || emit(arch))).collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    fn flags(&self, package: &Package) -> Flags {
        let mut flags = Flags { opt: package.opt_args.clone(), llc: package.llc_args.clone() };
        if self.fma_contraction {
            flags.llc.push("-fp-contract=fast".into());
        }
        if self.ftz {
            flags.opt.push("-denormal-fp-math-f32=preserve-sign".into());
        }
        if self.fast_sqrt {
            flags.llc.push("-nvptx-prec-sqrtf32=0".into());
        }
        if self.fast_div {
            flags.llc.push("-nvptx-prec-divf32=0".into());
        }
        flags
    }
}
