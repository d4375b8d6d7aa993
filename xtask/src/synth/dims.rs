//! The sizes of synthetic models, and the metadata that says them.

use host::gguf::{Value, Writer};
use host::model::config::Arch;

use super::Size;

/// A model's sizes; 0 where the network has no such thing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dims {
    pub(super) n_layer: usize,
    pub(super) n_embd: usize,
    pub(super) n_head: usize,
    pub(super) n_head_kv: usize,
    pub(super) head_dim: usize,
    pub(super) n_rot: usize,
    pub(super) n_vocab: usize,
    /// Hidden width of the FFN, or of one expert.
    pub(super) n_ff: usize,
    pub(super) n_expert: usize,
    pub(super) n_expert_used: usize,
    pub(super) n_ff_shexp: usize,
    /// Key heads of the delta net.
    pub(super) n_group: usize,
    /// Value heads of the delta net.
    pub(super) dt_rank: usize,
    pub(super) d_state: usize,
    pub(super) sliding_window: usize,
}

impl Dims {
    pub(super) fn of(arch: Arch, size: Size) -> Dims {
        match size {
            Size::Tiny => tiny(arch),
            Size::Mid => mid(arch),
            Size::Full => full(arch),
        }
    }

    /// Attention sizes; the other ones are 0.
    fn attention(n_layer: usize, n_embd: usize, n_head: usize, n_head_kv: usize) -> Dims {
        Dims { n_layer, n_embd, n_head, n_head_kv, ..Dims::default() }
    }

    fn heads(self, head_dim: usize, n_rot: usize) -> Dims {
        Dims { head_dim, n_rot, ..self }
    }

    fn widths(self, n_vocab: usize, n_ff: usize) -> Dims {
        Dims { n_vocab, n_ff, ..self }
    }

    fn experts(self, n_expert: usize, n_expert_used: usize) -> Dims {
        Dims { n_expert, n_expert_used, ..self }
    }

    fn delta_net(self, n_group: usize, dt_rank: usize, d_state: usize) -> Dims {
        Dims { n_group, dt_rank, d_state, n_ff_shexp: self.n_ff, ..self }
    }

    fn window(self, sliding_window: usize) -> Dims {
        Dims { sliding_window, ..self }
    }
}

/// The sizes of published models.
fn full(arch: Arch) -> Dims {
    let a = Dims::attention;
    match arch {
        // Llama 3.2 1B.
        Arch::Llama => a(16, 2048, 32, 8).heads(64, 64).widths(128256, 8192),
        // Qwen2.5 7B.
        Arch::Qwen2 => a(28, 3584, 28, 4).heads(128, 128).widths(152064, 18944),
        // Qwen3 8B.
        Arch::Qwen3 => a(36, 4096, 32, 8).heads(128, 128).widths(151936, 12288),
        // Qwen3 30B-A3B.
        Arch::Qwen3Moe => a(48, 2048, 32, 4).heads(128, 128).widths(151936, 768).experts(128, 8),
        // Qwen3.6 35B-A3B.
        Arch::Qwen35Moe => {
            let d = a(40, 2048, 16, 2).heads(256, 64).widths(248320, 512).experts(256, 8);
            d.delta_net(16, 32, 128)
        }
        // gpt-oss 20B.
        Arch::GptOss => a(24, 2880, 64, 8).heads(64, 64).widths(201088, 2880).experts(32, 4).window(128),
    }
}

/// The full model's layer shapes with fewer layers, experts and tokens.
fn mid(arch: Arch) -> Dims {
    let full = full(arch);
    let max_experts = if arch == Arch::GptOss { 8 } else { 32 };
    Dims { n_layer: 8, n_vocab: 32000, n_expert: full.n_expert.min(max_experts), ..full }
}

/// A few MB. Sizes differ from each other wherever the network lets them, so that a swapped pair shows.
fn tiny(arch: Arch) -> Dims {
    let a = Dims::attention;
    match arch {
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 => a(2, 256, 4, 2).heads(64, 64).widths(512, 512),
        Arch::Qwen3Moe => a(2, 256, 4, 1).heads(64, 64).widths(512, 256).experts(6, 2),
        Arch::Qwen35Moe => {
            let d = a(4, 256, 4, 2).heads(64, 16).widths(512, 256).experts(6, 3);
            d.delta_net(2, 4, 64)
        }
        Arch::GptOss => a(2, 256, 8, 2).heads(64, 64).widths(512, 256).experts(6, 2).window(16),
    }
}

/// Adds all keys of the network.
pub(super) fn put_metadata(writer: &mut Writer, arch: Arch, size: Size, dims: &Dims, mtp: bool) {
    writer.put_str("general.architecture", arch.name());
    writer.put_str("general.name", &format!("synthetic {} {size:?}", arch.name()).to_lowercase());
    let mut keys = Keys { writer, arch };
    keys.size("block_count", dims.n_layer + usize::from(mtp));
    keys.size("context_length", if size == Size::Tiny { 4096 } else { 131072 });
    keys.size("embedding_length", dims.n_embd);
    keys.size("attention.head_count", dims.n_head);
    keys.size("attention.head_count_kv", dims.n_head_kv);
    keys.size("attention.key_length", dims.head_dim);
    keys.size("attention.value_length", dims.head_dim);
    keys.size("rope.dimension_count", dims.n_rot);
    let (rms_eps, freq_base) = match arch {
        Arch::Llama => (1e-5, 1e4),
        Arch::GptOss => (1e-5, 1.5e5),
        Arch::Qwen35Moe => (1e-6, 1e7),
        Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe => (1e-6, 1e6),
    };
    keys.float("attention.layer_norm_rms_epsilon", rms_eps);
    keys.float("rope.freq_base", freq_base);
    keys.size("feed_forward_length", dims.n_ff);
    keys.size("vocab_size", dims.n_vocab);
    if arch.is_moe() {
        keys.size("expert_count", dims.n_expert);
        keys.size("expert_used_count", dims.n_expert_used);
        keys.size("expert_feed_forward_length", dims.n_ff);
    }
    match arch {
        Arch::Qwen35Moe => put_delta_net(&mut keys, dims, mtp),
        Arch::GptOss => {
            keys.size("attention.sliding_window", dims.sliding_window);
            keys.string("rope.scaling.type", "yarn");
            keys.float("rope.scaling.factor", 32.0);
            keys.size("rope.scaling.original_context_length", 4096);
        }
        _ => {}
    }
}

fn put_delta_net(keys: &mut Keys<'_>, dims: &Dims, mtp: bool) {
    // The published model has 11 + 11 + 10 of 32 pairs.
    let n_pairs = dims.n_rot / 2;
    let section = (n_pairs * 11).div_ceil(32);
    let sections = [section, section, n_pairs - 2 * section, 0].map(|n| n as i32);
    let key = keys.full("rope.dimension_sections");
    keys.writer.put_i32s(&key, &sections);
    keys.size("expert_shared_feed_forward_length", dims.n_ff_shexp);
    keys.size("ssm.conv_kernel", super::layout::D_CONV);
    keys.size("ssm.state_size", dims.d_state);
    keys.size("ssm.group_count", dims.n_group);
    keys.size("ssm.time_step_rank", dims.dt_rank);
    keys.size("ssm.inner_size", dims.dt_rank * dims.d_state);
    keys.size("full_attention_interval", super::layout::FULL_ATTENTION_INTERVAL);
    if mtp {
        keys.size("nextn_predict_layers", 1);
    }
}

/// Writes keys `{arch}.…`.
struct Keys<'a> {
    writer: &'a mut Writer,
    arch: Arch,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name())
    }

    fn size(&mut self, key: &str, value: usize) {
        let value = u32::try_from(value).expect("sizes come from the tables above");
        self.writer.put(&self.full(key), Value::U32(value));
    }

    fn float(&mut self, key: &str, value: f32) {
        self.writer.put(&self.full(key), Value::F32(value));
    }

    fn string(&mut self, key: &str, value: &str) {
        self.writer.put_str(&self.full(key), value);
    }
}
