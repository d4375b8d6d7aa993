//! What an engine will allocate, known before it does.

use crate::backend::PAGE_TOKENS;
use crate::model::config::Config;
use crate::model::executor::Limits;

/// The context taken where none is asked for, in tokens. Files claim up to a million, which is hardly ever used and
/// would fill any memory.
pub const DEFAULT_MAX_CTX: u32 = 8192;

/// Bytes an engine needs besides the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Keys and values of all pages.
    pub kv_bytes: u64,
    /// Recurrent state of all slots.
    pub state_bytes: u64,
    /// Activations and logits of the largest batch.
    pub batch_bytes: u64,
}

impl MemoryPlan {
    /// The plan for a cache with elements of `kv_elem_bytes`.
    pub fn new(config: &Config, limits: Limits, kv_elem_bytes: u64) -> Self {
        let n_pages = u64::from(limits.n_pages);
        let kv_elems = config.kv_elems_per_token() as u64;
        let kv_bytes = n_pages.saturating_mul(u64::from(PAGE_TOKENS)).saturating_mul(kv_elems * kv_elem_bytes);
        let state_bytes = u64::from(limits.n_slots).saturating_mul(config.state_elems_per_sequence() as u64 * 4);
        let row = config.n_embd as u64 * 4 + widest(config) * 4;
        let batch_elems = u64::from(limits.n_batch).saturating_mul(row)
            + u64::from(limits.n_outputs).saturating_mul((config.n_vocab + config.n_embd) as u64);
        Self { kv_bytes, state_bytes, batch_bytes: batch_elems.saturating_mul(4) }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.kv_bytes.saturating_add(self.state_bytes).saturating_add(self.batch_bytes)
    }
}

/// About the widest activation row of a layer, in elements.
fn widest(config: &Config) -> u64 {
    let attention = config.n_head * config.head_dim * 2;
    let ffn = config.moe.as_ref().map_or(config.n_ff, |moe| (2 * moe.n_ff_exp + config.n_embd) * moe.n_expert_used);
    let ssm = config.ssm.as_ref().map_or(0, |ssm| ssm.conv_dim());
    attention.max(ffn).max(ssm) as u64
}

/// The context for a model: what was asked for, or the model's own up to a cap.
pub fn choose_n_ctx(config: &Config, asked: Option<u32>) -> u32 {
    let trained = u32::try_from(config.n_ctx_train).unwrap_or(u32::MAX);
    match asked {
        Some(n_ctx) => {
            if n_ctx > trained {
                tracing::warn!("a context of {n_ctx} tokens is longer than the model was trained on ({trained})");
            }
            n_ctx
        }
        None if trained > DEFAULT_MAX_CTX => {
            tracing::info!("context: {DEFAULT_MAX_CTX} of the model's {trained} tokens (--ctx asks for more)");
            DEFAULT_MAX_CTX
        }
        None => trained,
    }
}

/// Bytes of memory that the operating system can still give; `None` if it does not say.
/// Source: proc_meminfo(5), `MemAvailable`; cgroup v2, `memory.max` and `memory.current`.
pub fn free_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let cgroup = |name: &str| {
        let text = std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let within_cgroup = cgroup("memory.max").zip(cgroup("memory.current")).map(|(max, now)| max.saturating_sub(now));
    Some(within_cgroup.map_or(available, |left| left.min(available)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Gguf;

    fn config() -> Config {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/zinc-tiny-qwen35moe.gguf");
        Config::from_gguf(&Gguf::open(path.as_ref()).expect("a model")).expect("its shape")
    }

    #[test]
    fn the_default_context_is_capped() {
        let mut config = config();
        config.n_ctx_train = 1 << 20;
        assert_eq!(choose_n_ctx(&config, None), DEFAULT_MAX_CTX);
        assert_eq!(choose_n_ctx(&config, Some(100_000)), 100_000);
        config.n_ctx_train = 512;
        assert_eq!(choose_n_ctx(&config, None), 512);
    }

    #[test]
    fn a_plan_counts_every_page() {
        let limits = Limits { n_pages: 1 << 20, n_slots: 1, n_batch: 1, n_outputs: 1 };
        let plan = MemoryPlan::new(&config(), limits, 4);
        let kv_bytes = (1u64 << 20) * 64 * config().kv_elems_per_token() as u64 * 4;
        assert_eq!(plan.kv_bytes, kv_bytes);
        assert_eq!(plan.total_bytes(), kv_bytes + plan.state_bytes + plan.batch_bytes);
        let most = Limits { n_pages: u32::MAX, n_slots: u32::MAX, n_batch: u32::MAX, n_outputs: u32::MAX };
        assert!(MemoryPlan::new(&config(), most, 4).total_bytes() > kv_bytes, "absurd limits do not wrap");
    }

    #[test]
    fn free_memory_is_known_on_linux() {
        if cfg!(target_os = "linux") {
            assert!(free_memory_bytes().is_some_and(|bytes| bytes > 0));
        }
    }
}
