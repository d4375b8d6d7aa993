//! The backend's operations, one by one, on every machine.
//!
//! A test is a function over a [`Machine`] and says what the definition demands; [`suite`] makes the tests of one
//! machine from all of them. Each is named for the fault that it would find.

mod attention;
mod delta_net;
mod dense;
mod moe;

use std::sync::Arc;

use gpu_kernels::blocks::GgmlType;
use host::backend::{Backend, Batch, PAGE_TOKENS, Span};
use host::cpu::CpuBackend;
use host::gguf::Gguf;

/// A kind of backend under test.
pub(crate) trait Machine {
    type B: Backend;
    /// Largest error of `Σ w·x`, relative to `Σ |w·x|`.
    const PRODUCT_ERROR: f64;
    fn backend(file: &Arc<Gguf>) -> Self::B;
}

/// f32 products in f32 sums of a few lanes each.
struct Cpu;

impl Machine for Cpu {
    type B = CpuBackend;
    const PRODUCT_ERROR: f64 = 1e-6;

    fn backend(file: &Arc<Gguf>) -> CpuBackend {
        CpuBackend::new(Arc::clone(file))
    }
}

/// All tests for one [`Machine`].
macro_rules! suite {
    ($machine:ty: $($module:ident { $($test:ident),+ $(,)? })+) => {
        $($(
            #[test]
            fn $test() {
                $module::$test::<$machine>();
            }
        )+)+
    };
}

macro_rules! suites {
    ($($name:ident = $machine:ty),+) => { $(
        mod $name {
            use super::*;
            suite! { $machine:
                dense {
                    norms_divide_by_the_root_of_mean_square_plus_eps,
                    products_of_every_weight_type,
                    embedding_rows_are_dequantised,
                    outputs_are_gathered_in_order,
                    gated_activations_at_their_corners,
                    sigmoid_of_the_gate_scales_what_is_added,
                }
                attention {
                    queries_and_gates_are_interleaved_per_head,
                    lanes_beyond_n_rot_do_not_turn,
                    pairs_turn_by_position_times_frequency,
                    the_sink_joins_the_denominator_only,
                    a_window_hides_the_key_at_its_distance,
                    nothing_beyond_the_length_is_read,
                    attention_equals_the_definition,
                }
                delta_net {
                    value_head_h_goes_with_key_head_h_mod_n_head_k,
                    the_delta_rule_equals_the_definition,
                    the_convolution_continues_across_batches,
                    the_gated_norm_is_per_head,
                    a_copied_state_continues_like_the_original,
                }
                moe {
                    routing_weights_follow_the_rule,
                    equal_logits_choose_the_lowest_experts,
                    the_router_bias_counts_before_the_choice,
                    expert_products_have_their_experts_weights_and_bias,
                }
            }
        }
    )+ };
}

suites! { cpu = Cpu }

/// A backend with a made-up file.
struct Bench<M: Machine> {
    file: Arc<Gguf>,
    b: M::B,
}

/// A tensor of the made-up file: name, dimensions (innermost first), type, bytes.
struct Made(&'static str, Vec<usize>, GgmlType, Vec<u8>);

fn f32s(name: &'static str, dims: &[usize], values: &[f32]) -> Made {
    assert_eq!(dims.iter().product::<usize>(), values.len(), "{name}");
    Made(name, dims.to_vec(), GgmlType::F32, bytemuck::cast_slice(values).to_vec())
}

impl<M: Machine> Bench<M> {
    fn new(tensors: &[Made]) -> Bench<M> {
        let file = Arc::new(Gguf::parse(&gguf_bytes(tensors)).expect("a well-formed file"));
        Bench { b: M::backend(&file), file }
    }

    fn matrix(&mut self, name: &str) -> <M::B as Backend>::Matrix {
        self.b.matrix(&self.file.tensor(name).expect("made")).expect("taken")
    }

    fn vector(&mut self, name: &str) -> <M::B as Backend>::Vector {
        self.b.vector(&self.file.tensor(name).expect("made")).expect("taken")
    }

    fn batch(&mut self, batch: &Batch) -> <M::B as Backend>::Batch {
        self.b.batch(batch).expect("taken")
    }

    fn zeros(&mut self, rows: usize, cols: usize) -> <M::B as Backend>::Tensor {
        self.b.tensor(rows as u32, cols as u32).expect("allocated")
    }

    /// Activations with the rows of tensor `name`, which come in through `embed`.
    fn rows(&mut self, name: &str) -> <M::B as Backend>::Tensor {
        let tensor = self.file.tensor(name).expect("made");
        let (rows, cols) = (tensor.rows(), tensor.cols());
        self.rows_at(name, &(0..rows as u32).collect::<Vec<_>>(), cols)
    }

    /// As [`Bench::rows`], with only the listed rows.
    fn rows_at(&mut self, name: &str, rows: &[u32], cols: usize) -> <M::B as Backend>::Tensor {
        let table = self.matrix(name);
        let mut batch = sequence(0, rows.len());
        batch.tokens = rows.to_vec();
        let batch = self.batch(&batch);
        let mut out = self.zeros(rows.len(), cols);
        self.b.embed(&mut out, &table, &batch).expect("embedded");
        out
    }

    fn read(&mut self, x: &<M::B as Backend>::Tensor, rows: usize) -> Vec<f32> {
        let mut out = Vec::new();
        self.b.read(x, rows as u32, &mut out).expect("read");
        out
    }
}

/// `rows` tokens of one sequence in slot 0, from position `start` on, on pages 0, 1, 2, …
fn sequence(start: usize, rows: usize) -> Batch {
    let pages = (0..(start + rows).div_ceil(PAGE_TOKENS as usize) as u32).collect();
    let span = Span { slot: 0, start: start as u32, rows: rows as u32, pages };
    Batch { tokens: (0..rows as u32).collect(), spans: vec![span], outputs: vec![] }
}

/// Uniform values in [−1, 1) that depend on `seed` alone. Source: Marsaglia, "Xorshift RNGs", 2003.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Checks that every value is within `bound(i)` of what is wanted.
fn assert_close(what: &str, found: &[f32], wanted: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let error = (f64::from(*found) - wanted).abs();
        assert!(error <= bound(i), "{what}: value {i} is {found} instead of {wanted}, bound {:e}", bound(i));
    }
}

fn gguf_bytes(tensors: &[Made]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(0u64.to_le_bytes());
    let mut offset = 0u64;
    for Made(name, dims, ty, bytes) in tensors {
        out.extend((name.len() as u64).to_le_bytes());
        out.extend(name.as_bytes());
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
        out.extend((*ty as u32).to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += (bytes.len() as u64).next_multiple_of(32);
    }
    for Made(.., bytes) in tensors {
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(bytes);
    }
    out
}
