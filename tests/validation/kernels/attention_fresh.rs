//! Attention straight from projections: to the bits of heads made ready first, which have tests of their own against
//! their definition, as has attention of those.

#![expect(unsafe_code, reason = "launches whose page tables live on the device")]

use gpu_kernels::kernels::rope::RopeParams;
use half::f16;
use host::backend::{AttentionShape, PAGE_TOKENS};
use host::gpu::Device;
use host::gpu::ops::{self, Attention, AttentionOut, Heads, KvSlice, OpError, Partials, Placement, Queries, Split};

use super::{Output, Random, assert_same_bits, input, on_devices};

struct Case {
    n_head: u32,
    n_head_kv: u32,
    head_dim: u32,
    n_rot: u32,
    split: Split,
    window: Option<u32>,
    gated: bool,
    biases: bool,
    norms: bool,
}

/// A row of each sequence: the first key, around chunks, splits and pages, and several splits.
const POS: [u32; 6] = [0, 15, 63, 64, 130, 257];

/// Keys and values of all positions before the rows', NaN elsewhere.
fn cache(random: &mut Random, pages: u32, kv_dim: usize) -> Vec<u16> {
    let page = PAGE_TOKENS as usize * kv_dim;
    let mut all = vec![f16::NAN.to_bits(); pages as usize * page];
    let mut first = 0;
    for pos in POS {
        let bits: Vec<u16> = random.units(pos as usize * kv_dim).iter().map(|&x| f16::from_f32(x).to_bits()).collect();
        all[first * page..][..bits.len()].copy_from_slice(&bits);
        first += (pos / PAGE_TOKENS + 1) as usize;
    }
    all
}

fn check<D: Device>(device: &D, case: &Case) {
    let Case { n_head, n_head_kv, head_dim, split, .. } = *case;
    let mut random = Random::new(u64::from(head_dim + n_head));
    let rows = POS.len();
    let (q_dim, kv_dim) = ((n_head * head_dim) as usize, (n_head_kv * head_dim) as usize);
    let max_pages = POS.iter().map(|pos| pos / PAGE_TOKENS + 1).max().expect("rows");
    let mut page_table = vec![u32::MAX; rows * max_pages as usize];
    let mut n_pages = 0;
    for (row, pos) in POS.iter().enumerate() {
        for page in 0..=pos / PAGE_TOKENS {
            page_table[row * max_pages as usize + page as usize] = n_pages;
            n_pages += 1;
        }
    }
    let all_rows: Vec<u32> = (0..rows as u32).collect();
    let (pos, each, ones) = (input(device, &POS), input(device, &all_rows), input(device, &vec![1u32; rows]));
    let table = input(device, &page_table);
    let at = Placement {
        pos: pos.slice(),
        span: each.slice(),
        page_table: table.slice(),
        max_pages,
        first: each.slice(),
        span_rows: ones.slice(),
        short: each.slice(),
    };
    let mut floats = |n: usize| input(device, &random.units(n));
    let q_len = rows * q_dim * if case.gated { 2 } else { 1 };
    let (q, k, v) = (floats(q_len), floats(rows * kv_dim), floats(rows * kv_dim));
    let biases = [floats(q_dim), floats(kv_dim), floats(kv_dim)];
    let norms = [floats(head_dim as usize), floats(head_dim as usize)];
    let frequencies = (0..case.n_rot / 2).map(|i| 1e4_f64.powf(-2.0 * f64::from(i) / f64::from(case.n_rot)));
    let turns = input(device, &ops::turns(frequencies));
    let heads = Heads {
        q: q.slice(),
        gated: case.gated,
        k: k.slice(),
        v: v.slice(),
        biases: biases.each_ref().map(|bias| case.biases.then(|| bias.slice())),
        norms: norms.each_ref().map(|norm| case.norms.then(|| norm.slice())),
        eps: 1e-5,
        rope: RopeParams { n_head, head_dim, n_rot: case.n_rot, adjacent: 0, magnitude: 1.0 },
        turns: turns.slice(),
        n_head_kv,
        at,
        dependent: true,
    };
    let before = [cache(&mut random, n_pages, kv_dim), cache(&mut random, n_pages, kv_dim)];
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { n_head, n_head_kv, head_dim, scale, window: case.window };

    let run = |fresh: bool| {
        let caches = before.each_ref().map(|values| Output::<D, u16>::holding(device, values));
        let kv = (KvSlice::F16(caches[0].slice()), KvSlice::F16(caches[1].slice()));
        let q_out = Output::<D, f32>::new(device, rows * q_dim);
        let queries = if fresh {
            Queries::Fresh(&heads)
        } else {
            // SAFETY: the table names a page for every position.
            unsafe { ops::attention_heads(device, &heads, q_out.slice(), kv) }.expect("attention_heads");
            Queries::Ready(q_out.slice())
        };
        let split_heads = rows * (n_head * split.n) as usize;
        let part = Output::<D, f32>::new(device, split_heads * head_dim as usize);
        let max_sum = Output::<D, f32>::new(device, 2 * split_heads);
        let out = Output::<D, f32>::new(device, rows * q_dim);
        let op = Attention {
            q: queries,
            kv,
            at,
            partials: Partials { out: part.slice(), max_sum: max_sum.slice(), split },
            sinks: None,
            shape,
            dependent: true,
        };
        let to = AttentionOut { out: out.slice(), pairs: case.gated.then(|| q.slice()), q8: None };
        // SAFETY: as above; rows are each alone in their sequence.
        unsafe { ops::attention(device, &op, to) }.expect("attention");
        (out.read(device), caches.each_ref().map(|cache| cache.read(device)))
    };
    let ((got, got_kv), (want, want_kv)) = (run(true), run(false));
    let what = format!("attention of projections, {n_head} heads of {head_dim}, {n_head_kv} of keys");
    assert!(got.iter().all(|x| x.is_finite()), "{what}");
    assert_same_bits(&what, &got, &want);
    assert_same_bits(&what, &got_kv[0], &want_kv[0]);
    assert_same_bits(&what, &got_kv[1], &want_kv[1]);
}

#[test]
fn attention_of_projections_is_that_of_heads_made_ready() {
    fn checks<D: Device>(device: &D) {
        let base = Case {
            n_head: 4,
            n_head_kv: 2,
            head_dim: 64,
            n_rot: 64,
            split: Split::new(3),
            window: None,
            gated: false,
            biases: true,
            norms: false,
        };
        check(device, &base);
        // Eight query heads a key head, and ten: a block for eight and one for two.
        let gated = Case { n_head: 8, n_head_kv: 1, head_dim: 256, gated: true, norms: true, n_rot: 64, ..base };
        check(device, &gated);
        check(device, &Case { split: Split { n: 1, block_heads: 2 }, ..gated });
        check(device, &Case { split: Split { n: 3, block_heads: 3 }, ..gated });
        check(device, &Case { n_head: 20, n_head_kv: 2, norms: true, biases: false, ..base });
        check(
            device,
            &Case { n_head: 3, n_head_kv: 3, head_dim: 128, n_rot: 128, norms: true, split: Split::new(1), ..base },
        );
        check(device, &Case { window: Some(70), split: Split::new(2), ..base });
    }
    on_devices!(checks);
}

#[test]
fn attention_of_projections_wants_rows_alone_in_their_sequences() {
    fn checks<D: Device>(device: &D) {
        let (pos, span, table) = (input(device, &[0u32, 1]), input(device, &[0u32, 0]), input(device, &[0u32]));
        let (first, span_rows, short) = (input(device, &[0u32]), input(device, &[2u32]), input(device, &[0u32, 1]));
        let at = Placement {
            pos: pos.slice(),
            span: span.slice(),
            page_table: table.slice(),
            max_pages: 1,
            first: first.slice(),
            span_rows: span_rows.slice(),
            short: short.slice(),
        };
        let cache = device.alloc_zeroed::<u16>(PAGE_TOKENS as usize * 64).expect("memory");
        let wide = device.alloc_zeroed::<f32>(PAGE_TOKENS as usize * 64).expect("memory");
        let kv = (KvSlice::F16(cache.slice()), KvSlice::F16(cache.slice()));
        assert!(!ops::takes_fresh(kv, &at), "two rows of one sequence");
        let alone = Placement { pos: pos.slice().part(0..1).expect("inside"), ..at };
        let alone = Placement { short: short.slice().part(0..1).expect("inside"), ..alone };
        assert!(ops::takes_fresh(kv, &alone));
        assert!(!ops::takes_fresh((KvSlice::F32(wide.slice()), KvSlice::F32(wide.slice())), &alone), "an f32 cache");

        let x = device.alloc_zeroed::<f32>(128).expect("memory");
        let room = device.alloc_zeroed::<f32>(512).expect("memory");
        let turns = device.alloc_zeroed::<u64>(32).expect("memory");
        let rope = RopeParams { n_head: 1, head_dim: 64, n_rot: 64, adjacent: 0, magnitude: 1.0 };
        let (x, room) = (x.slice(), room.slice());
        let heads = Heads {
            q: x,
            gated: false,
            k: x,
            v: x,
            biases: [None; 3],
            norms: [None; 2],
            eps: 1e-5,
            rope,
            turns: turns.slice(),
            n_head_kv: 1,
            at,
            dependent: false,
        };
        let part = |range| room.part(range).expect("inside");
        let op = Attention {
            q: Queries::Fresh(&heads),
            kv,
            at,
            partials: Partials { out: part(0..128), max_sum: part(128..256), split: Split::new(1) },
            sinks: None,
            shape: AttentionShape { n_head: 1, n_head_kv: 1, head_dim: 64, scale: 1.0, window: None },
            dependent: false,
        };
        let to = AttentionOut { out: part(256..384), pairs: None, q8: None };
        // SAFETY: it is refused.
        let refused = unsafe { ops::attention(device, &op, to) };
        assert!(matches!(refused, Err(OpError::Operand { operand: "q", .. })), "{refused:?}");
    }
    on_devices!(checks);
}
