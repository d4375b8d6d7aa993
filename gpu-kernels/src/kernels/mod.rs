//! The GPU kernels. Each file is one operation: its equation, its shapes, its entry points.
//!
//! A kernel trusts its launcher: what it needs (shapes, extents, alignment) is in its `# Safety` section,
//! and the launcher in the host crate checks it. Geometry that both must agree on is a constant here.

pub mod argmax;
pub mod attention;
pub mod conformance;
pub mod delta_state;
pub mod elementwise;
pub mod embedding;
pub mod expert_down;
pub mod expert_down_grouped;
pub mod feed;
pub mod format;
pub mod gate_up;
pub mod gate_up_grouped;
pub mod gated_act;
pub mod grouped;
pub mod kv_cache;
pub mod matmul;
pub mod matmul_float;
pub mod matmul_split;
pub mod matvec;
pub mod matvec_swept;
pub mod matvecs;
pub mod moe;
pub mod norm_gate_up;
pub mod norm_matvecs;
mod normed_row;
pub mod quantize_q8;
pub mod read_sweep;
pub mod repack;
pub mod rms_norm;
pub mod rope;
pub mod route_groups;
pub mod sample;
pub mod softmax_topk;
pub mod spans;
pub mod ssm_conv1d;
pub mod ssm_delta_chunk;
pub mod ssm_delta_net;
pub mod ssm_delta_step;
pub mod ssm_gated_norm;
pub mod to_bf16;
pub mod topk_groups;
