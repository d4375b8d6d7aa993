//! Kernels that do nothing but use `cuda_std`: what they compute, the emulated device and a GPU have to agree on.
//!
//! The emulator's results are only worth something if its instructions are the GPU's. So each group of
//! instructions has a kernel here, and the tests hold both devices against the ISA's definition.

use cuda_std::prelude::*;
use cuda_std::{atomic, cp_async, mma, wgmma};

/// Lanes a block, where a kernel does not say otherwise.
pub const THREADS: u32 = 256;
/// Words a lane of [`conformance_collectives`] leaves.
pub const N_COLLECTIVES: usize = 12;
/// Words a lane of [`conformance_math`] leaves.
pub const N_MATH: usize = 18;
/// Words a lane of [`conformance_convert`] leaves.
pub const N_CONVERT: usize = 13;

/// `y[k, lane]`: result `k` of the shuffles, votes and reductions of one warp.
///
/// # Safety
/// One block of 32 lanes; `y [N_COLLECTIVES, 32]`.
#[kernel(max_threads = 32)]
pub unsafe fn conformance_collectives(y: *mut u32) {
    let lane = thread::thread_idx_x();
    let results: [u32; N_COLLECTIVES] = [
        warp::shuffle_xor(lane, 5),
        warp::shuffle_down(lane, 3),
        warp::shuffle_up(lane, 3),
        warp::shuffle_idx(lane, lane / 2),
        warp::warp_shuffle_down(warp::FULL_MASK, lane, 3, 8).0,
        warp::warp_shuffle_up(warp::FULL_MASK, lane, 3, 8).0,
        warp::warp_shuffle_idx(warp::FULL_MASK, lane, 9, 8).0,
        warp::ballot(lane.is_multiple_of(3)),
        u32::from(warp::all(lane < 32)) + 2 * u32::from(warp::any(lane == 31)) + 4 * u32::from(warp::all(lane < 31)),
        warp::sum(lane),
        warp::max_u32(lane * 37 % 29),
        warp::min_u32(100 + lane * 37 % 29),
    ];
    for (k, result) in (0..).zip(results) {
        st(y.add(k * 32 + lane as usize), result);
    }
}

/// `y[i] = max(x)` for `i < n`: reductions of a block between two branches on one condition, which an optimiser must
/// not copy into both of them.
///
/// # Safety
/// One block of 64 lanes, 8 bytes of shared memory; `x` and `y` have `n ≤ 64` elements.
#[kernel(max_threads = 64)]
pub unsafe fn conformance_between_branches(x: *const f32, y: *mut f32, n: u32) {
    let lane = thread::thread_idx_x();
    let mut value = f32::NEG_INFINITY;
    if lane < n {
        value = ld(x.add(lane as usize));
    }
    let max = block::reduce_max(dynamic(0), value);
    if lane < n {
        st(y.add(lane as usize), max);
    }
}

/// `c[16,8] = a[16,32]·b[8,32]ᵀ + 1` in s8: A by `ldmatrix`, B by its fragment's definition. As one product and as two
/// of 16 columns each; `i32::MIN` where they differ.
///
/// # Safety
/// One block of 32 lanes, 512 bytes of shared memory; `a` 32 vectors, `b` 64 words, `c` 128 words.
#[kernel(max_threads = 32)]
pub unsafe fn conformance_mma_s8(a: *const U32x4, b: *const u32, c: *mut i32) {
    let lane = thread::thread_idx_x();
    let (g, t) = (lane / 4, lane % 4);
    let tile = dynamic::<U32x4>(0);
    tile.set(lane, ld(a.add(lane as usize))); // row lane/2, half lane%2
    block::sync_threads(); // the tile is whole before its rows are loaded
    // Matrices 0 and 1: rows 0–7 and 8–15 of the first 16 columns; 2 and 3: of the last.
    let row = lane % 8 + 8 * (lane / 8 % 2);
    let a = mma::ldmatrix_x4(tile, row * 2 + lane / 16);
    let b = [ld(b.add((g * 8 + t) as usize)), ld(b.add((g * 8 + 4 + t) as usize))];
    let d = mma::m16n8k32_s8(a, b, [1; 4]);
    let first = mma::m16n8k16_s8([a[0], a[1]], b[0], [1; 4]);
    let halves = mma::m16n8k16_s8([a[2], a[3]], b[1], first);
    for j in 0..4 {
        let value = if d[j as usize] == halves[j as usize] { d[j as usize] } else { i32::MIN };
        st(c.add(((g + 8 * (j / 2)) * 8 + 2 * t + j % 2) as usize), value);
    }
}

/// `c[16,8] = a[16,16]·b[16,8] + ½` in f16 (`bf16` = 0) or bf16: both by `ldmatrix`, B, which lies row by row,
/// transposed.
///
/// # Safety
/// One block of 32 lanes, 768 bytes of shared memory; `a` 32 vectors, `b` 16 vectors, `c` 128 words.
#[kernel(max_threads = 32)]
pub unsafe fn conformance_mma_16bit(a: *const U32x4, b: *const U32x4, c: *mut f32, bf16: u32) {
    let lane = thread::thread_idx_x();
    let (g, t) = (lane / 4, lane % 4);
    let (a_tile, b_tile) = (dynamic::<U32x4>(0), dynamic::<U32x4>(512));
    a_tile.set(lane, ld(a.add(lane as usize))); // row lane/2, half lane%2
    if lane < 16 {
        b_tile.set(lane, ld(b.add(lane as usize))); // one row of eight
    }
    block::sync_threads(); // both tiles are whole before their rows are loaded
    let row = lane % 8 + 8 * (lane / 8 % 2);
    let a = mma::ldmatrix_x4(a_tile, row * 2 + lane / 16);
    let [b0, b1, ..] = mma::ldmatrix_x4_trans(b_tile, lane % 16);
    let d =
        if bf16 == 0 { mma::m16n8k16_f16(a, [b0, b1], [0.5; 4]) } else { mma::m16n8k16_bf16(a, [b0, b1], [0.5; 4]) };
    for (j, value) in (0..).zip(d) {
        st(c.add(((g + 8 * (j / 2)) * 8 + 2 * t + j % 2) as usize), value);
    }
}

/// `c[64,128] = a[64,64]·b[128,64]ᵀ` in bf16, as one product of 112 columns and one of the last 16, each 16 rows of `b`
/// at a time: A by its fragment's definition, B copied to where its descriptor says.
///
/// # Safety
/// One block of 128 lanes, 16 KiB of shared memory; `a` 2048 words, `b` 1024 vectors, `c` `64·128` elements. On a GPU:
/// one that has these products.
#[kernel(max_threads = 128)]
pub unsafe fn conformance_wgmma(a: *const u32, b: *const U32x4, c: *mut f32) {
    wgmma::require();
    let thread = thread::thread_idx_x();
    let (g, t) = (thread % 32 / 4, thread % 4);
    let tile = dynamic::<u8>(0);
    let mut unit = thread;
    while unit < 1024 {
        tile.add(wgmma::swizzle_128(16 * unit)).cast().set(0, ld(b.add(unit as usize)));
        unit += 128;
    }
    wgmma::fence_shared();
    block::sync_threads(); // the tile is whole, and visible to the products

    let (mut first, mut last) = ([0.0; 56], [0.0; 8]);
    let from = wgmma::Descriptor::new(tile);
    let rest = wgmma::Descriptor::new(tile.add(112 * wgmma::COLUMN_BYTES));
    let row = thread / 32 * 16 + g;
    wgmma::begin(&mut first);
    wgmma::begin(&mut last);
    for k in 0..4 {
        let word = |row: u32, word: u32| ld(a.add((row * 32 + 8 * k + word) as usize));
        let a = [word(row, t), word(row + 8, t), word(row, t + 4), word(row + 8, t + 4)];
        wgmma::fence();
        wgmma::mma_bf16::<112, 56>(&mut first, a, from.rows(k));
        wgmma::mma_bf16::<16, 8>(&mut last, a, rest.rows(k));
        wgmma::commit();
    }
    wgmma::finish(&mut first);
    wgmma::finish(&mut last);
    let store = |j: u32, column: u32, value: f32| {
        let (row, column) = (row + 8 * (j / 2 % 2), column + 8 * (j / 4) + 2 * t + j % 2);
        st(c.add((row * 128 + column) as usize), value);
    };
    for j in 0..56 {
        store(j, 0, first[j as usize]);
    }
    for j in 0..8 {
        store(j, 112, last[j as usize]);
    }
}

/// `y[k, i]`: function `k` of `math` at `x[i]`, in the order of the array below.
///
/// # Safety
/// Grid covers `n` lanes; `x [n]`, `y [N_MATH, n]`.
#[kernel(max_threads = 256)]
pub unsafe fn conformance_math(x: *const f32, y: *mut f32, n: u32) {
    let i = thread::index_1d();
    if i >= n {
        return;
    }
    let v = ld(x.add(i as usize));
    let (sin, cos) = math::sin_cos(v);
    let results: [f32; N_MATH] = [
        math::exp(v),
        math::exp2_approx(v),
        math::log(v),
        math::log2_approx(v),
        math::softplus(v),
        math::sigmoid(v),
        math::silu(v),
        math::tanh(v),
        math::tanh_approx(v),
        sin,
        cos,
        math::sqrt(v),
        math::rsqrt(v),
        math::rcp(v),
        math::rint(v),
        math::round_to_i32(v) as f32,
        math::max(v, 1.0) - math::min(v, 1.0),
        math::fma(v, v, 1.5),
    ];
    for (k, result) in (0..).zip(results) {
        st(y.add(k * n as usize + i as usize), result);
    }
}

/// `y[k, i]`: conversion or byte operation `k` of the bits `x[i]` (and `w[i]`), in the order of the array below.
///
/// # Safety
/// Grid covers `n` lanes; `x [n]`, `w [n]`, `y [N_CONVERT, n]`.
#[kernel(max_threads = 256)]
pub unsafe fn conformance_convert(x: *const u32, w: *const u32, y: *mut u32, n: u32) {
    let i = thread::index_1d();
    if i >= n {
        return;
    }
    let (bits, other) = (ld(x.add(i as usize)), ld(w.add(i as usize)));
    let (half, float) = (bits as u16, f32::from_bits(bits));
    let [b0, b1, b2, b3] = int8::unpack_i8x4(bits);
    let results: [u32; N_CONVERT] = [
        convert::f16_to_f32(half).to_bits(),
        convert::bf16_to_f32(half).to_bits(),
        u32::from(convert::f32_to_f16(float)),
        u32::from(convert::f32_to_bf16(float)),
        convert::pack_f16x2(float, 2.0),
        convert::pack_bf16x2(float, 2.0),
        int8::dp4a(bits.cast_signed(), other.cast_signed(), 7).cast_unsigned(),
        int8::dp4a_us(bits, other.cast_signed(), 7).cast_unsigned(),
        int8::prmt(bits, other, 0x3175),
        int8::prmt(bits, other, 0xfb80),
        int8::pack_i8x4([b3, b2, b1, b0]),
        int8::prmt(bits, other, other >> 7),
        math::fma_bf16x2(bits, other, bits.rotate_left(7)),
    ];
    for (k, result) in (0..).zip(results) {
        st(y.add(k * n as usize + i as usize), result);
    }
}

/// `y[lane] = (Σx, max x)` of the block, `counts[lane]`: how many are above ½, and whether all and any are.
///
/// # Safety
/// One block of `THREADS` lanes, 32 bytes of shared memory; `x`, `y` and `counts` have `THREADS` elements.
#[kernel(max_threads = 256)]
pub unsafe fn conformance_block(x: *const f32, y: *mut F32x2, counts: *mut U32x4) {
    let lane = thread::thread_idx_x() as usize;
    let v = ld(x.add(lane));
    let scratch = dynamic(0);
    st(y.add(lane), F32x2 { x: block::reduce_sum(scratch, v), y: block::reduce_max(scratch, v) });
    let above = v > 0.5;
    let counts_here = U32x4 {
        x: block::sync_threads_count(above),
        y: u32::from(block::sync_threads_and(above)),
        z: u32::from(block::sync_threads_or(above)),
        w: u32::from(block::sync_threads_and(true)),
    };
    st(counts.add(lane), counts_here);
}

/// Every lane of the grid adds to the counters; the last block to finish says so in `last`.
///
/// # Safety
/// Blocks of `THREADS` lanes, 8 bytes of shared memory; `counters` 5 words, `sums` 2 and `wide` 1, zero; `last` 3
/// words.
#[kernel(max_threads = 256)]
pub unsafe fn conformance_atomics(counters: *mut u32, sums: *mut f32, wide: *mut u64, last: *mut u32) {
    let lane = thread::thread_idx_x();
    let (count, sum) = (dynamic::<u32>(0), dynamic::<f32>(4));
    if lane == 0 {
        count.set(0, 0);
        sum.set(0, 0.0);
    }
    block::sync_threads(); // both are zero before anybody adds
    count.atomic_add(0, 2);
    sum.atomic_add(0, 0.5);
    atomic::atomic_add_u32(counters, 1);
    atomic::red_add_u32(counters.add(1), 2);
    atomic::red_add_release(counters.add(2), 3);
    atomic::atomic_max_u32(counters.add(3), thread::index_1d());
    atomic::atomic_add_f32(sums, 1.0);
    atomic::red_add_f32(sums.add(1), 2.0);
    atomic::red_add_u64(wide, (1 << 32) + 1);
    block::sync_threads(); // everything of this block is counted
    if lane == 0 && atomic::atomic_add_acq_rel(counters.add(4), 1) == thread::grid_dim_x() - 1 {
        st(last, atomic::ld_acquire(counters));
        atomic::st_release(last.add(1), count.get(0) + sum.get(0) as u32);
        let old = atomic::atomic_compare_exchange(counters.add(4), thread::grid_dim_x(), 77);
        atomic::st_relaxed(last.add(2), old + atomic::atomic_exchange(counters.add(4), 78));
    }
}

/// `y[i]`: `x[i]` by every kind of load, added up word by word, and by asynchronous copies.
///
/// # Safety
/// One block of `THREADS` lanes, `20·THREADS` bytes of shared memory; `x` and `y` have `THREADS` vectors.
#[kernel(max_threads = 256)]
pub unsafe fn conformance_loads(x: *const U32x4, y: *mut U32x4) {
    let lane = thread::thread_idx_x();
    let from = x.add(lane as usize);
    let tile = dynamic::<U32x4>(0);
    mem::prefetch_l2(from);
    cp_async::copy_16_or_zero(tile, lane, from, !lane.is_multiple_of(3));
    let (words, pairs, row) = (from.cast::<u32>(), from.cast::<U32x2>(), dynamic::<u32>(16 * THREADS));
    cp_async::copy_4_or_zero(row, lane, words.add(3), !lane.is_multiple_of(5));
    cp_async::commit();
    let sum = U32x4 {
        x: mem::ld_cs(from).x + mem::ld_cs(pairs).x + mem::ld_cs(words),
        y: mem::ld_nc(from).y + mem::ld_nc(pairs).y + mem::ld_nc(words.add(1)),
        z: mem::ld_no_allocate(from).z + mem::ld_no_allocate(pairs.add(1)).x + mem::ld_no_allocate(words.add(2)),
        w: mem::ld_evict_first(from).w + mem::ld_evict_first(pairs.add(1)).y + mem::ld_evict_first(words.add(3)),
    };
    cp_async::wait::<0>();
    block::sync_threads(); // every lane's copy is there before others read it
    let copied = tile.get(lane ^ 1);
    let part = tile.cast::<u16>().get((lane ^ 1) * 8);
    let total = U32x4 {
        x: sum.x + copied.x + u32::from(part),
        y: sum.y + copied.y,
        z: sum.z + copied.z,
        w: sum.w + copied.w + row.get(lane ^ 1),
    };
    st(y.add(lane as usize), total);
}
