//! Attention at the depths and in the shapes of the models.

use gpu_kernels::kernels::rope::RopeParams;

use super::{Bench, Result};
use crate::backend::{AttentionShape, PAGE_TOKENS};
use crate::gpu::device::Device;
use crate::gpu::memory::Buffer;
use crate::gpu::ops::{self, MIN_SPAN_ROWS};

/// The layouts, with what they are called in the table, and whether they have sinks.
const SHAPES: [(&str, AttentionShape, bool); 4] = [
    ("16 heads of 256 over 2", shape(16, 2, 256, None), false),
    ("64 heads of 64 over 8, sinks", shape(64, 8, 64, None), true),
    ("64 heads of 64 over 8, sinks, window 128", shape(64, 8, 64, Some(128)), true),
    ("32 heads of 128 over 8", shape(32, 8, 128, None), false),
];

const fn shape(n_head: u32, n_head_kv: u32, head_dim: u32, window: Option<u32>) -> AttentionShape {
    AttentionShape { n_head, n_head_kv, head_dim, scale: 0.0625, window }
}

/// Sequences of one length in a cache, and as many such batches as it takes to get past the second-level cache: the
/// layers of a model do not find their keys there either.
struct Caches<D: Device> {
    k: Buffer<D, u16>,
    v: Buffer<D, u16>,
    pos: Buffer<D, u32>,
    span: Buffer<D, u32>,
    tables: Vec<Buffer<D, u32>>,
    max_pages: u32,
    first: Buffer<D, u32>,
    span_rows: Buffer<D, u32>,
    short: Buffer<D, u32>,
}

impl<D: Device> Caches<D> {
    /// `n_seq` sequences of `rows` rows each, the last at position `depth - 1`.
    fn new(device: &D, shape: &AttentionShape, n_seq: u32, rows: u32, depth: u32, min_bytes: usize) -> Result<Self> {
        let (max_pages, kv_dim) = (depth.div_ceil(PAGE_TOKENS), shape.n_head_kv * shape.head_dim);
        let seen = shape.window.map_or(depth, |window| window.min(depth)) as usize;
        let copies = min_bytes.div_ceil(n_seq as usize * seen * kv_dim as usize * 4).clamp(1, 64) as u32;
        // Pages ahead of the first window are all the same one, for nobody reads them.
        let used = shape.window.map_or(max_pages, |window| ((rows + window) / PAGE_TOKENS + 2).min(max_pages));
        let elems = (copies * n_seq * used * PAGE_TOKENS) as usize * kv_dim as usize;
        let table = |copy: u32| -> Vec<u32> {
            // Pages of a sequence are not neighbours.
            let page = |s: u32, i: u32| i.checked_sub(max_pages - used).map_or(0, |i| (copy * used + i) * n_seq + s);
            (0..n_seq).flat_map(|s| (0..max_pages).map(move |i| page(s, i))).collect()
        };
        let pos: Vec<u32> = (0..n_seq).flat_map(|_| depth - rows..depth).collect();
        let span: Vec<u32> = (0..n_seq).flat_map(|s| std::iter::repeat_n(s, rows as usize)).collect();
        Ok(Caches {
            // Zero keys give equal scores, which is as much work as any.
            k: device.alloc_zeroed(elems)?,
            v: device.alloc_zeroed(elems)?,
            pos: device.alloc_from(&pos)?,
            span: device.alloc_from(&span)?,
            tables: (0..copies).map(|copy| Ok(device.alloc_from(&table(copy))?)).collect::<Result<_>>()?,
            max_pages,
            first: device.alloc_from(&(0..n_seq).map(|s| s * rows).collect::<Vec<_>>())?,
            span_rows: device.alloc_from(&vec![rows; n_seq as usize])?,
            short: device.alloc_from(&(0..n_seq * rows).filter(|_| rows < MIN_SPAN_ROWS).collect::<Vec<_>>())?,
        })
    }

    fn kv(&self) -> (ops::KvSlice<'_>, ops::KvSlice<'_>) {
        (ops::KvSlice::F16(self.k.slice()), ops::KvSlice::F16(self.v.slice()))
    }

    /// The batch of launch number `i`.
    fn at(&self, i: usize) -> ops::Placement<'_> {
        let page_table = self.tables[i % self.tables.len()].slice();
        ops::Placement {
            pos: self.pos.slice(),
            span: self.span.slice(),
            page_table,
            max_pages: self.max_pages,
            first: self.first.slice(),
            span_rows: self.span_rows.slice(),
            short: self.short.slice(),
        }
    }
}

impl<D: Device> Bench<'_, D> {
    /// All of them.
    pub(super) fn attention(&mut self) -> Result<()> {
        let small = self.is_small();
        self.heads()?;
        for (name, shape, sinks) in SHAPES {
            for depth in if small { [70, 130] } else { [8192, 32768] } {
                for n_seq in [1, if small { 2 } else { 32 }] {
                    self.attend("attention and merge", name, &shape, sinks, (n_seq, 1, depth))?;
                }
            }
            for rows in if small { [64, 70] } else { [2048, 8192] } {
                self.attend("attention, tiles", name, &shape, sinks, (1, rows, rows))?;
            }
        }
        Ok(())
    }

    /// The last rows of each sequence.
    #[expect(unsafe_code, reason = "the page tables are made here")]
    fn attend(
        &mut self,
        what: &'static str,
        name: &str,
        shape: &AttentionShape,
        sinks: bool,
        (n_seq, rows, depth): (u32, u32, u32),
    ) -> Result<()> {
        let min_bytes = if self.is_small() { 0 } else { 4 * self.device.properties().l2_bytes as usize };
        let caches = Caches::new(self.device, shape, n_seq, rows, depth, min_bytes)?;
        let heads = (n_seq * rows * shape.n_head) as usize;
        let n = heads * shape.head_dim as usize;
        let split_rows = ops::split_rows(&caches.at(0), caches.kv(), shape);
        let split = ops::split(self.device.properties(), split_rows, shape, caches.kv(), depth);
        let split_heads = (split_rows * shape.n_head * split.n) as usize;
        let (q, out) = (self.floats(n)?, self.floats(n)?);
        let (part, max_sum) = (self.floats(split_heads * shape.head_dim as usize)?, self.floats(2 * split_heads)?);
        let partials = ops::Partials { out: part.slice(), max_sum: max_sum.slice(), split };
        let sink = self.floats(shape.n_head as usize)?;
        let seen = shape.window.map_or(depth, |window| window.min(depth));
        // Keys and values in f16 once; queries and outputs in f32.
        let keys = u64::from(n_seq) * u64::from((seen + rows - 1).min(depth));
        let bytes = 4 * keys * u64::from(shape.n_head_kv * shape.head_dim) + 8 * n as u64;
        // Two products of each query with each key that it sees.
        let pairs: u64 = (depth - rows + 1..=depth).map(|len| u64::from(len.min(seen))).sum();
        let gflop = 4e-9 * (u64::from(n_seq) * pairs * u64::from(shape.n_head * shape.head_dim)) as f64;
        let mut i = 0;
        self.chain(what, &format!("{n_seq} x {rows} at {depth}, {name}, {gflop:.2} GFLOP"), |d| {
            i += 1;
            let op = ops::Attention {
                q: ops::Queries::Ready(q.slice()),
                kv: caches.kv(),
                at: caches.at(i),
                partials,
                sinks: sinks.then(|| sink.slice()),
                shape: *shape,
                dependent: true,
            };
            let to = ops::AttentionOut { out: out.slice(), pairs: None, q8: None };
            // SAFETY: the tables name pages of the caches for every position.
            unsafe { ops::attention(d, &op, to)? };
            Ok(bytes)
        })
    }

    /// What comes before attention, one row.
    #[expect(unsafe_code, reason = "the page table is made here")]
    fn heads(&mut self) -> Result<()> {
        let (name, shape, _) = SHAPES[0];
        let (q_dim, kv_dim) = ((shape.n_head * shape.head_dim) as usize, (shape.n_head_kv * shape.head_dim) as usize);
        let caches = Caches::new(self.device, &shape, 1, 1, 70, 0)?;
        let (pairs, q) = (self.floats(2 * q_dim)?, self.floats(q_dim)?);
        let (k, v, norm) = (self.floats(kv_dim)?, self.floats(kv_dim)?, self.floats(shape.head_dim as usize)?);
        let turns = self.device.alloc_from(&ops::turns((0..32).map(|i| 1e7_f64.powf(-f64::from(i) / 32.0))))?;
        let rope =
            RopeParams { n_head: shape.n_head, head_dim: shape.head_dim, n_rot: 64, adjacent: 0, magnitude: 1.0 };
        self.chain("kv_cache_write", "1 x 512, f16", |d| {
            // SAFETY: the table names pages of the caches for every position.
            unsafe { ops::kv_cache_write(d, k.slice(), v.slice(), caches.at(0), caches.kv(), kv_dim as u32) }
        })?;
        let op = ops::Heads {
            q: pairs.slice(),
            gated: true,
            k: k.slice(),
            v: v.slice(),
            biases: [None; 3],
            norms: [Some(norm.slice()); 2],
            eps: 1e-6,
            rope,
            turns: turns.slice(),
            n_head_kv: shape.n_head_kv,
            at: caches.at(0),
            dependent: true,
        };
        self.chain("attention_heads", &format!("1 x {name}, 64 turn"), |d| {
            // SAFETY: as above.
            unsafe { ops::attention_heads(d, &op, q.slice(), caches.kv()) }
        })
    }
}
