//! Model shapes from GGUF metadata: what the golden models say, and what is refused.

use gpu_kernels::blocks::GgmlType;
use host::gguf::{Gguf, Value, Writer};
use host::model::config::{Arch, Config, DEFAULT_N_CTX, LayerKind, MAX_N_CTX, Pairing, RopeScaling, Yarn};

use crate::checkout;
use crate::gguf::craft::{ARCHS, copy, golden};

/// The golden model's file with some keys left out and others added.
fn with(arch: &str, without: &[&str], change: impl FnOnce(&mut Writer)) -> Gguf {
    let full = |key: &&str| if key.contains("tokenizer") { (*key).to_owned() } else { format!("{arch}.{key}") };
    let without: Vec<String> = without.iter().map(full).collect();
    let keep = |key: &str| !without.iter().any(|gone| gone == key);
    Gguf::parse(&copy(&golden(arch), keep, |_| true, change, &[])).unwrap()
}

/// The golden model's config with one key replaced.
fn with_value(arch: &str, key: &str, value: Value<'_>) -> Result<Config, String> {
    let gguf = with(arch, &[key], |writer| writer.put(&format!("{arch}.{key}"), value));
    Config::from_gguf(&gguf).map_err(|error| error.to_string())
}

/// Asserts that a value is refused with a message that names its key.
#[track_caller]
fn assert_refused(arch: &str, key: &str, value: Value<'_>) {
    let message = with_value(arch, key, value).expect_err("the value must be refused");
    assert!(message.contains(&format!("\"{arch}.{key}\"")), "{message}");
}

fn config(arch: &str) -> Config {
    Config::from_gguf(&golden(arch)).unwrap()
}

#[test]
fn golden_models_have_their_shapes() {
    for arch in ARCHS {
        let c = config(arch);
        assert_eq!((c.arch, c.arch.name()), (Arch::from_name(arch).unwrap(), arch));
        assert_eq!((c.n_embd, c.head_dim, c.n_vocab, c.n_ctx_train), (256, 64, 512, 4096), "{arch}");
        assert_eq!(c.layers.len(), c.n_layer);
        let pairing = if arch == "llama" { Pairing::Adjacent } else { Pairing::SplitHalf };
        assert_eq!(c.rope.pairing, pairing);
        assert_eq!(c.moe.is_some(), ["qwen3moe", "qwen35moe", "gpt-oss"].contains(&arch));
        assert_eq!(c.ssm.is_some(), arch == "qwen35moe");
    }
}

#[test]
fn reference_architecture() {
    let c = Config::from_gguf(&Gguf::open(&checkout::zinc_tiny()).unwrap()).unwrap();
    assert_eq!((c.n_layer, c.n_nextn, c.n_head, c.n_head_kv, c.rope.n_rot), (8, 1, 4, 2, 16));
    assert_eq!((c.rope.freq_base, c.rope.sections), (1e7, Some([3, 3, 2, 0])));
    let full: Vec<usize> = (0..8).filter(|&il| c.layers[il] == LayerKind::Full).collect();
    assert_eq!(full, [3, 7]);
    assert_eq!(c.full_attention_interval, 4);
    let moe = c.moe.as_ref().unwrap();
    assert_eq!((moe.n_expert, moe.n_expert_used, moe.n_ff_exp, moe.n_ff_shexp), (8, 2, 256, 256));
    assert!(moe.norm_weights && moe.weights_scale == 1.0);
    let ssm = c.ssm.as_ref().unwrap();
    assert_eq!((ssm.d_conv, ssm.d_inner, ssm.d_state, ssm.dt_rank, ssm.n_group), (4, 256, 64, 4, 2));
    assert_eq!(ssm.conv_dim(), 2 * 2 * 64 + 256);
    assert_eq!(c.kv_elems_per_token(), 2 * 2 * 2 * 64);
    assert_eq!(c.state_elems_per_sequence(), 6 * (4 * 64 * 64 + 8 * 512));
}

#[test]
fn gpt_oss_slides_in_even_layers_and_uses_yarn() {
    let c = config("gpt-oss");
    assert_eq!(c.layers, [LayerKind::Sliding, LayerKind::Full]);
    assert_eq!(c.sliding_window, 16);
    let yarn =
        Yarn { factor: 32.0, n_ctx_orig: 4096, ext_factor: 1.0, attn_factor: 1.0, beta_fast: 32.0, beta_slow: 1.0 };
    assert_eq!(c.rope.scaling, RopeScaling::Yarn(yarn));
}

#[test]
fn sliding_pattern_as_period_and_as_list() {
    let pattern = |value| with_value("gpt-oss", "attention.sliding_window_pattern", value).map(|c| c.layers);
    assert_eq!(pattern(Value::U32(1)).unwrap(), [LayerKind::Full, LayerKind::Full]);
    assert_eq!(pattern(Value::U32(3)).unwrap(), [LayerKind::Sliding, LayerKind::Sliding]);
    assert!(pattern(Value::U32(0)).is_err());
    let list = |slides: &[bool]| {
        let gguf = with("gpt-oss", &[], |writer| writer.put_bools("gpt-oss.attention.sliding_window_pattern", slides));
        Config::from_gguf(&gguf).map(|c| c.layers)
    };
    assert_eq!(list(&[false, true]).unwrap(), [LayerKind::Full, LayerKind::Sliding]);
    assert!(list(&[true]).is_err());
}

#[test]
fn delta_net_layers_as_interval_and_as_list() {
    let full = |c: Config| -> Vec<usize> { (0..c.n_layer).filter(|&il| c.layers[il] == LayerKind::Full).collect() };
    assert_eq!(full(with_value("qwen35moe", "full_attention_interval", Value::U32(2)).unwrap()), [1, 3]);
    let list = with("qwen35moe", &[], |writer| {
        writer.put_bools("qwen35moe.attention.recurrent_layers", &[false, true, true, false]);
    });
    assert_eq!(full(Config::from_gguf(&list).unwrap()), [0, 3]);
}

/// B47: a context length is a claim, and nothing to fail or to allocate by.
#[test]
fn b47_absurd_context_lengths_load() {
    for arch in ["llama", "gpt-oss", "qwen35moe"] {
        let n_ctx = |value| with_value(arch, "context_length", value).unwrap().n_ctx_train;
        assert_eq!(n_ctx(Value::U32(i32::MAX as u32)), MAX_N_CTX);
        assert_eq!(n_ctx(Value::U64(1 << 40)), MAX_N_CTX);
        assert_eq!(n_ctx(Value::U64(u64::MAX)), MAX_N_CTX);
        assert_eq!(n_ctx(Value::U32(0)), DEFAULT_N_CTX);
        assert_eq!(n_ctx(Value::I32(131072)), 131072);
        let missing = with(arch, &["context_length"], |_| ());
        assert_eq!(Config::from_gguf(&missing).unwrap().n_ctx_train, DEFAULT_N_CTX);
    }
}

#[test]
fn sizes_out_of_range_are_refused_by_key() {
    let sizes = ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"];
    for key in sizes.iter().chain(&["attention.head_count_kv", "attention.key_length", "rope.dimension_count"]) {
        for value in [Value::U32(0), Value::U32(u32::MAX), Value::U64(u64::MAX), Value::I32(-1), Value::F32(1.0)] {
            assert_refused("llama", key, value);
        }
    }
    for key in ["expert_count", "expert_used_count", "expert_feed_forward_length", "ssm.group_count"] {
        assert_refused("qwen35moe", key, Value::U32(0));
        assert_refused("qwen35moe", key, Value::U32(1 << 30));
    }
    for key in ["ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank", "ssm.inner_size", "full_attention_interval"]
    {
        assert_refused("qwen35moe", key, Value::U32(0));
        assert_refused("qwen35moe", key, Value::U32(1 << 30));
    }
    assert_refused("gpt-oss", "attention.sliding_window", Value::U32(0));
}

#[test]
fn contradictions_are_refused_by_key() {
    assert_refused("llama", "attention.head_count_kv", Value::U32(3));
    assert_refused("llama", "attention.value_length", Value::U32(32));
    assert_refused("llama", "rope.dimension_count", Value::U32(65));
    assert_refused("llama", "rope.dimension_count", Value::U32(128));
    assert_refused("llama", "expert_count", Value::U32(8));
    assert_refused("qwen3moe", "expert_used_count", Value::U32(7));
    assert_refused("qwen3moe", "expert_gating_func", Value::U32(2));
    assert_refused("qwen35moe", "ssm.inner_size", Value::U32(128));
    assert_refused("qwen35moe", "ssm.group_count", Value::U32(3));
    assert_refused("qwen35moe", "nextn_predict_layers", Value::U32(4));
}

#[test]
fn floats_out_of_range_are_refused_by_key() {
    for value in [f32::NAN, f32::INFINITY, -1.0, 0.0] {
        assert_refused("llama", "attention.layer_norm_rms_epsilon", Value::F32(value));
        assert_refused("llama", "rope.freq_base", Value::F32(value));
    }
    for value in [f32::NAN, f32::INFINITY, -1.0] {
        assert_refused("gpt-oss", "rope.scaling.factor", Value::F32(value));
    }
    assert_refused("gpt-oss", "rope.scaling.yarn_beta_slow", Value::F32(64.0));
    assert_refused("gpt-oss", "rope.scaling.type", Value::String(b"longrope"));
}

#[test]
fn rope_scaling_kinds() {
    let scaling = |ty: &[u8], factor: f32| {
        let gguf = with("llama", &[], |writer| {
            writer.put("llama.rope.scaling.type", Value::String(ty));
            writer.put("llama.rope.scaling.factor", Value::F32(factor));
        });
        Config::from_gguf(&gguf).unwrap().rope.scaling
    };
    assert_eq!(scaling(b"none", 4.0), RopeScaling::None);
    assert_eq!(scaling(b"linear", 4.0), RopeScaling::Linear { factor: 4.0 });
    assert_eq!(scaling(b"linear", 0.0), RopeScaling::None);
    // YaRN without an original length extends the trained one.
    let RopeScaling::Yarn(yarn) = scaling(b"yarn", 4.0) else { panic!("yarn") };
    assert_eq!((yarn.factor, yarn.n_ctx_orig), (4.0, 4096));
    let old_name = with_value("llama", "rope.scale_linear", Value::F32(2.0)).unwrap();
    assert_eq!(old_name.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn missing_keys_have_the_documented_defaults() {
    let heads = ["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"];
    let c = Config::from_gguf(&with("llama", &heads, |_| ())).unwrap();
    assert_eq!((c.n_head_kv, c.head_dim, c.rope.n_rot), (4, 64, 64));
    assert_eq!(Config::from_gguf(&with("llama", &["rope.freq_base"], |_| ())).unwrap().rope.freq_base, 10000.0);
    for key in ["block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"] {
        let error = Config::from_gguf(&with("llama", &[key], |_| ())).unwrap_err().to_string();
        assert!(error.contains(&format!("\"llama.{key}\" is missing")), "{error}");
    }
}

#[test]
fn one_size_for_each_layer_must_be_the_same() {
    let heads = |values: &[i32]| {
        let gguf = with("qwen3", &["attention.head_count_kv"], |writer| {
            writer.put_i32s("qwen3.attention.head_count_kv", values);
        });
        Config::from_gguf(&gguf).map(|c| c.n_head_kv).map_err(|error| error.to_string())
    };
    assert_eq!(heads(&[2, 2]), Ok(2));
    for bad in [&[2, 4][..], &[2], &[], &[-2, -2]] {
        let error = heads(bad).unwrap_err();
        assert!(error.contains("\"qwen3.attention.head_count_kv\""), "{error}");
    }
}

#[test]
fn unsupported_architectures_are_named() {
    let mut writer = Writer::new();
    writer.put_str("general.architecture", "qwen35");
    let gguf = Gguf::parse(&writer.to_bytes([])).unwrap();
    let error = Config::from_gguf(&gguf).unwrap_err().to_string();
    assert!(error.contains("\"qwen35\" is not supported") && error.contains("qwen35moe, gpt-oss"), "{error}");
    let error = Config::from_gguf(&Gguf::parse(&Writer::new().to_bytes([])).unwrap()).unwrap_err().to_string();
    assert!(error.contains("\"general.architecture\" is missing"), "{error}");
}

/// B17: the head may have more rows than there are tokens, and never fewer.
#[test]
fn b17_tokens_without_rows_are_refused() {
    let tokens = |n: usize| {
        let tokens: Vec<String> = (0..n).map(|id| id.to_string()).collect();
        Config::from_gguf(&with("qwen2", &[], |writer| writer.put_strings("tokenizer.ggml.tokens", &tokens)))
    };
    assert_eq!(tokens(300).unwrap().n_vocab, 512);
    assert_eq!(tokens(512).unwrap().n_vocab, 512);
    assert!(tokens(513).unwrap_err().to_string().contains("\"token_embd.weight\": 512 rows for 513 tokens"));
}

#[test]
fn embedding_of_another_width_is_refused() {
    let from = golden("qwen2");
    let data = vec![0; 22 * 7 * 10];
    let embd = [("token_embd.weight", GgmlType::Q5_0, vec![32 * 7, 10], &data[..])];
    let file = copy(&from, |_| true, |name| name != "token_embd.weight", |_| (), &embd);
    let error = Config::from_gguf(&Gguf::parse(&file).unwrap()).unwrap_err().to_string();
    assert!(error.contains("\"token_embd.weight\": [224, 10] is not [n_embd = 256, n_vocab]"), "{error}");
}
