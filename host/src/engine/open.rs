//! From a file and options to an engine.

use std::path::Path;
use std::sync::Arc;

use super::Engine;
use super::device::{OpenDevice, WORKING_BYTES};
use super::error::EngineError;
use super::options::{CPU_BATCH, DeviceChoice, EngineOptions};
use super::plan::{MemoryPlan, choose_n_ctx};
use crate::backend::PAGE_TOKENS;
use crate::chat::Template;
use crate::cuda::KernelSource;
use crate::gguf::Gguf;
use crate::gpu::BackendOptions;
use crate::model::config::Config;
use crate::model::executor::{Executor, Limits};
use crate::tokenizer::{Tokenizer, TokenizerError};

pub(super) fn open(path: &Path, options: &EngineOptions) -> Result<Engine, EngineError> {
    let gguf = Arc::new(Gguf::open(path)?);
    let config = Config::from_gguf(&gguf)?;
    let tokenizer = read_tokenizer(path, &gguf)?;
    let template = read_template(&gguf, tokenizer.as_ref(), options)?;
    let mut options = options.clone();
    let device = OpenDevice::open(&options.device, &options.kernels, &config, weights_bytes(&gguf))?;
    let limits = choose_limits(&config, &mut options, &device, weights_bytes(&gguf))?;
    let executor = device.load(gguf, limits, options.gpu, options.n_draft > 0)?;
    Engine::new(executor, tokenizer, template, &options)
}

/// Loads a model's weights onto a device and allocates what `limits` ask for.
///
/// # Errors
/// The file is damaged, or the device is not there or too small.
pub fn load(gguf: Arc<Gguf>, device: &DeviceChoice, limits: Limits) -> Result<Box<dyn Executor>, EngineError> {
    load_with(gguf, device, &KernelSource::Embedded, limits, BackendOptions::default())
}

/// [`load`] with options for a GPU, and its kernels.
///
/// # Errors
/// As there.
pub fn load_with(
    gguf: Arc<Gguf>,
    device: &DeviceChoice,
    kernels: &KernelSource,
    limits: Limits,
    options: BackendOptions,
) -> Result<Box<dyn Executor>, EngineError> {
    let config = Config::from_gguf(&gguf)?;
    let device = OpenDevice::open(device, kernels, &config, weights_bytes(&gguf))?;
    device.load(gguf, limits, options, false)
}

/// Bytes of all tensors.
fn weights_bytes(gguf: &Gguf) -> u64 {
    gguf.tensors().map(|tensor| tensor.n_bytes as u64).sum()
}

/// What a model takes of a GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Tokens of context that this is for.
    pub n_ctx: u32,
    /// The weights.
    pub weights_bytes: u64,
    /// What comes with the context and the batch.
    pub plan: MemoryPlan,
    /// Left for what the plan does not count.
    pub reserve_bytes: u64,
}

impl Needs {
    /// The needs of a model with these options.
    ///
    /// # Errors
    /// The file is no model that zinc runs, or an option is out of range.
    pub fn of(gguf: &Gguf, options: &EngineOptions) -> Result<Needs, EngineError> {
        let config = Config::from_gguf(gguf)?;
        let n_ctx = choose_n_ctx(&config, options.n_ctx);
        let plan = MemoryPlan::new(&config, limits(&config, options, n_ctx)?, options.gpu.kv.bytes());
        Ok(Needs { n_ctx, weights_bytes: weights_bytes(gguf), plan, reserve_bytes: WORKING_BYTES })
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.plan.total_bytes()).saturating_add(self.reserve_bytes)
    }
}

/// Checks the options and settles `options.n_ctx`: what was asked for has to fit, the default is halved until it does.
fn choose_limits(
    config: &Config,
    options: &mut EngineOptions,
    device: &OpenDevice,
    weights_bytes: u64,
) -> Result<Limits, EngineError> {
    for (option, value) in [("slots", options.n_slots), ("batch", options.n_batch), ("ctx", options.n_ctx.unwrap_or(1))]
    {
        if value == 0 {
            return Err(EngineError::Option { option, value: 0, why: "has to be at least 1".to_owned() });
        }
    }
    let outputs = options.n_draft.checked_add(1).and_then(|rows| rows.checked_mul(options.n_slots));
    let too_many = || EngineError::Option {
        option: "draft",
        value: options.n_draft.into(),
        why: format!("is too many for {} sequences", options.n_slots),
    };
    let n_outputs = outputs.filter(|n| *n <= MAX_OUTPUTS).ok_or_else(too_many)?;
    if matches!(device, OpenDevice::Cpu) {
        options.n_batch = options.n_batch.min(CPU_BATCH);
    }
    options.n_batch = options.n_batch.max(n_outputs);
    let mut n_ctx = choose_n_ctx(config, options.n_ctx);
    loop {
        let limits = limits(config, options, n_ctx)?;
        let plan = MemoryPlan::new(config, limits, device.kv_elem_bytes(&options.gpu));
        let free = device.free_bytes().unwrap_or(u64::MAX);
        let free = free.saturating_sub(device.own_weights_bytes(weights_bytes));
        // The block that guesses has keys and values of its own.
        let n_guessing = if options.n_draft > 0 { config.n_embd_kv() as u64 * 2 } else { 0 };
        let elems = u64::from(limits.n_pages).saturating_mul(u64::from(PAGE_TOKENS)).saturating_mul(n_guessing);
        let needed = plan.total_bytes().saturating_add(elems.saturating_mul(device.kv_elem_bytes(&options.gpu)));
        if needed <= free {
            tracing::info!(
                "context {n_ctx} tokens × {} slots: KV cache {} MiB, state {} MiB, batch {} MiB",
                options.n_slots,
                plan.kv_bytes >> 20,
                plan.state_bytes >> 20,
                plan.batch_bytes >> 20
            );
            options.n_ctx = Some(n_ctx);
            return Ok(limits);
        }
        if options.n_ctx.is_some() || n_ctx <= PAGE_TOKENS {
            return Err(EngineError::Memory { n_ctx, n_slots: options.n_slots, needed, free });
        }
        n_ctx /= 2;
        tracing::warn!("memory is short: the context is cut to {n_ctx} tokens");
    }
}

/// Rows of logits that a step may ask for.
const MAX_OUTPUTS: u32 = 1 << 16;

fn limits(config: &Config, options: &EngineOptions, n_ctx: u32) -> Result<Limits, EngineError> {
    let recurrent = config.state_elems_per_sequence() > 0;
    let n_checkpoints = if recurrent && options.prefix_reuse { options.n_checkpoints } else { 0 };
    let too_many = || EngineError::Option {
        option: "slots",
        value: u64::from(options.n_slots),
        why: format!("is too many for a context of {n_ctx} tokens"),
    };
    let n_pages = n_ctx.div_ceil(PAGE_TOKENS).checked_mul(options.n_slots).ok_or_else(too_many)?;
    let n_backups = if recurrent && options.n_draft > 0 { options.n_slots } else { 0 };
    let n_slots = options.n_slots.checked_add(n_backups).and_then(|n| n.checked_add(n_checkpoints));
    let n_outputs = options.n_slots * (1 + options.n_draft);
    Ok(Limits { n_pages, n_slots: n_slots.ok_or_else(too_many)?, n_batch: options.n_batch, n_outputs })
}

/// The file's tokenizer; `None` where it has no vocabulary, which is enough to run ids.
fn read_tokenizer(path: &Path, gguf: &Gguf) -> Result<Option<Arc<Tokenizer>>, EngineError> {
    match Tokenizer::from_gguf(gguf) {
        Ok(tokenizer) => Ok(Some(Arc::new(tokenizer))),
        Err(TokenizerError::NoVocabulary) => Ok(None),
        Err(source) => Err(EngineError::Tokenizer { path: path.to_owned(), source }),
    }
}

/// The template that was asked for, or the file's own.
fn read_template(
    gguf: &Gguf,
    tokenizer: Option<&Arc<Tokenizer>>,
    options: &EngineOptions,
) -> Result<Option<Arc<Template>>, EngineError> {
    let Some(tokenizer) = tokenizer else { return Ok(None) };
    if let Some(path) = &options.chat_template {
        return Ok(Some(Arc::new(Template::from_file(path, tokenizer)?)));
    }
    Ok(Template::from_gguf(gguf, tokenizer)?.map(Arc::new))
}
