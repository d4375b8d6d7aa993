//! The kernels, by operation.

pub mod argmax;
pub mod attention;
pub mod elementwise;
pub mod gated_act;
pub mod kv_cache;
pub mod moe;
pub mod rope;
pub mod softmax_topk;
pub mod ssm_conv1d;
pub mod ssm_delta_net;
pub mod ssm_gated_norm;
