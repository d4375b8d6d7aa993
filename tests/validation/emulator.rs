//! The emulated device catches what it promises to catch, and runs what is right alike in every order.
//!
//! Each kernel below has one fault planted, of the kind that passes unseen on a GPU most of the time.

#![allow(unsafe_code, reason = "kernels are unsafe functions; these are run by the emulator only")]

use cuda_std::emu::{Access, Device, Fault, Order, Space, What};
use cuda_std::launch::Launch;
use cuda_std::prelude::*;
use cuda_std::{atomic, cp_async, mma};

const ORDERS: [Order; 4] = [Order::Forward, Order::Backward, Order::Shuffled(1), Order::Shuffled(2)];

/// Runs `f` on a device of every order; all runs have to give the same.
fn in_every_order<R: PartialEq + std::fmt::Debug>(f: impl Fn(&Device) -> R) -> R {
    let mut results = ORDERS.map(|order| f(&Device::with_order(order))).into_iter();
    let first = results.next().expect("there are orders");
    for (result, order) in results.zip(&ORDERS[1..]) {
        assert_eq!(result, first, "{order:?} differs from {:?}", ORDERS[0]);
    }
    first
}

/// The fault that every order reports. Lanes may differ between orders, kinds may not.
fn fault_in_every_order(f: impl Fn(&Device) -> Result<(), Fault>) -> Fault {
    let faults = ORDERS.map(|order| f(&Device::with_order(order)).expect_err("the planted fault is reported"));
    for fault in &faults {
        assert_eq!(std::mem::discriminant(&fault.what), std::mem::discriminant(&faults[0].what), "{fault}");
        let blames_a_line = !matches!(fault.what, What::Panic(_) | What::Launch(_) | What::Stuck);
        assert_eq!(fault.at.map(|at| at.file().ends_with("emulator.rs")), blames_a_line.then_some(true), "{fault}");
    }
    let [first, ..] = faults;
    first
}

// Global memory

/// `y[i] = x[i]`, without asking whether there is an `i`.
#[kernel]
unsafe fn copy_unchecked(x: *const f32, y: *mut f32) {
    let i = thread::index_1d() as usize;
    st(y.add(i), ld(x.add(i)));
}

#[test]
fn out_of_bounds_accesses_are_reported() {
    let fault = fault_in_every_order(|device| {
        let (x, y) = (device.upload(&[1.0f32; 95]), device.alloc::<f32>(96));
        device.launch(copy_unchecked, Launch::linear(3, 32), (x.as_ptr(), y.as_mut_ptr()))
    });
    assert_eq!((fault.kernel, fault.block, fault.thread), ("copy_unchecked", [2, 0, 0], [31, 0, 0]));
    let What::OutOfBounds { space: Space::Global, access: Access::Read, bytes: 4, nearest, .. } = &fault.what else {
        panic!("{fault}");
    };
    assert_eq!(nearest, "380 bytes into an allocation of 380");

    let fault = fault_in_every_order(|device| {
        let (x, y) = (device.upload(&[1.0f32; 96]), device.alloc::<f32>(95));
        device.launch(copy_unchecked, Launch::linear(3, 32), (x.as_ptr(), y.as_mut_ptr()))
    });
    assert!(matches!(fault.what, What::OutOfBounds { access: Access::Write, .. }), "{fault}");
}

#[test]
fn freed_and_null_pointers_are_reported() {
    let fault = fault_in_every_order(|device| {
        let y = device.alloc::<f32>(32);
        let freed = device.upload(&[1.0f32; 32]).as_ptr();
        device.launch(copy_unchecked, Launch::linear(1, 32), (freed, y.as_mut_ptr()))
    });
    assert!(matches!(fault.what, What::OutOfBounds { .. }), "{fault}");
    let fault = fault_in_every_order(|device| {
        let y = device.alloc::<f32>(32);
        device.launch(copy_unchecked, Launch::linear(1, 32), (std::ptr::null(), y.as_mut_ptr()))
    });
    assert!(matches!(fault.what, What::OutOfBounds { .. }), "{fault}");
}

#[test]
fn reads_of_unwritten_global_memory_are_reported() {
    let fault = fault_in_every_order(|device| {
        let (x, y) = (device.alloc::<f32>(32), device.alloc::<f32>(32));
        x.write(0, &[1.0; 31]);
        device.launch(copy_unchecked, Launch::linear(1, 32), (x.as_ptr(), y.as_mut_ptr()))
    });
    assert!(matches!(fault.what, What::Uninitialised { space: Space::Global, .. }), "{fault}");
    assert_eq!(fault.thread, [31, 0, 0]);
}

/// Four elements at once, from `offset` on.
#[kernel]
unsafe fn copy_vector(x: *const f32, y: *mut F32x4, offset: u32) {
    st(y, ld(x.add(offset as usize).cast::<F32x4>()));
}

#[test]
fn misaligned_accesses_are_reported() {
    let run = |device: &Device, offset| {
        let (x, y) = (device.upload(&[1.0f32; 16]), device.alloc::<F32x4>(1));
        device.launch(copy_vector, Launch::linear(1, 1), (x.as_ptr(), y.as_mut_ptr(), offset))
    };
    assert!(run(&Device::new(), 4).is_ok());
    let fault = fault_in_every_order(|device| run(device, 6));
    assert!(matches!(fault.what, What::Misaligned { space: Space::Global, align: 16, .. }), "{fault}");
}

// Shared memory

/// `y[i] = x[n−1−i]` over shared memory; `barrier` 0 leaves the barrier out.
#[kernel]
unsafe fn reverse(x: *const f32, y: *mut f32, barrier: u32) {
    let (i, n) = (thread::thread_idx_x(), thread::block_dim_x());
    let tile = dynamic::<f32>(0);
    tile.set(i, ld(x.add(i as usize)));
    match barrier {
        0 => {}
        1 => block::sync_threads(),
        _ => warp::sync_warp(warp::FULL_MASK),
    }
    st(y.add(i as usize), tile.get(n - 1 - i));
}

fn run_reverse(device: &Device, n: u32, barrier: u32, shared_bytes: u32) -> Result<Vec<f32>, Fault> {
    let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let (x, y) = (device.upload(&x), device.alloc::<f32>(n as usize));
    device.launch(reverse, Launch::linear(1, n).shared(shared_bytes), (x.as_ptr(), y.as_mut_ptr(), barrier))?;
    Ok(y.to_vec())
}

#[test]
fn a_missing_barrier_is_reported_in_every_order() {
    let y = in_every_order(|device| run_reverse(device, 256, 1, 1024).expect("the barrier is there"));
    assert!(y.iter().enumerate().all(|(i, &v)| v == (255 - i) as f32));
    for n in [32, 256] {
        for order in ORDERS {
            let fault = run_reverse(&Device::with_order(order), n, 0, n * 4).expect_err("no barrier");
            // Whoever comes first sees a byte that nobody wrote; later ones a race.
            assert!(matches!(fault.what, What::Race { .. } | What::Uninitialised { space: Space::Shared, .. }), "{fault}");
        }
    }
}

/// Two phases on the same bytes: read, then overwrite. `barrier` 0 leaves the barrier between them out.
#[kernel]
unsafe fn rotate_twice(y: *mut u32, barrier: u32) {
    let (i, n) = (thread::thread_idx_x(), thread::block_dim_x());
    let tile = dynamic::<u32>(0);
    tile.set(i, i);
    block::sync_threads();
    let v = tile.get((i + 1) % n);
    if barrier != 0 {
        block::sync_threads();
    }
    tile.set(i, v);
    block::sync_threads();
    st(y.add(i as usize), tile.get((i + 1) % n));
}

#[test]
fn overwriting_what_others_still_read_is_a_race() {
    let run = |device: &Device, barrier| {
        let y = device.alloc::<u32>(64);
        device.launch(rotate_twice, Launch::linear(1, 64).shared(256), (y.as_mut_ptr(), barrier))?;
        Ok(y.to_vec())
    };
    let y = in_every_order(|device| run(device, 1).map_err(|fault: Fault| fault.what));
    assert_eq!(y, Ok((0..64).map(|i| (i + 2) % 64).collect()));
    let fault = fault_in_every_order(|device| run(device, 0).map(drop));
    assert!(matches!(fault.what, What::Race { .. }), "{fault}");
}

#[test]
fn sync_warp_orders_a_warp_but_not_a_block() {
    assert!(in_every_order(|device| run_reverse(device, 32, 2, 128).is_ok()));
    for order in ORDERS {
        let fault = run_reverse(&Device::with_order(order), 64, 2, 256).expect_err("two warps");
        assert!(matches!(fault.what, What::Race { .. } | What::Uninitialised { .. }), "{fault}");
    }
}

#[test]
fn shared_memory_has_an_end() {
    let fault = fault_in_every_order(|device| run_reverse(device, 64, 1, 252).map(drop));
    assert!(matches!(fault.what, What::OutOfBounds { space: Space::Shared, access: Access::Write, address: 252, .. }), "{fault}");
}

/// Counts in shared memory, which nobody sets to zero unless `clear` says so.
#[kernel]
unsafe fn count_shared(y: *mut u32, clear: u32) {
    let counter = dynamic::<u32>(0);
    if clear != 0 && thread::thread_idx_x() == 0 {
        counter.set(0, 0);
    }
    block::sync_threads();
    counter.atomic_add(0, 1);
    block::sync_threads();
    if thread::thread_idx_x() == 0 {
        st(y, counter.get(0));
    }
}

#[test]
fn shared_memory_is_not_zero_at_first() {
    let run = |device: &Device, clear| {
        let y = device.alloc::<u32>(1);
        // Two blocks: the second must not see what the first left behind.
        device.launch(count_shared, Launch::linear(2, 64).shared(4), (y.as_mut_ptr(), clear))?;
        Ok(y.to_vec()[0])
    };
    let count = in_every_order(|device| run(device, 1).map_err(|fault: Fault| fault.what));
    assert_eq!(count, Ok(64), "atomics do not race with each other");
    let fault = fault_in_every_order(|device| run(device, 0).map(drop));
    assert!(matches!(fault.what, What::Uninitialised { space: Space::Shared, address: 0 }), "{fault}");
}

/// A tile by asynchronous copy; `wait` 0 does not wait for it.
#[kernel]
unsafe fn copy_tile(x: *const U32x4, y: *mut U32x4, wait: u32) {
    let i = thread::thread_idx_x();
    let tile = dynamic::<U32x4>(0);
    cp_async::copy_16_or_zero(tile, i, x.add(i as usize), i % 2 == 0);
    cp_async::commit();
    if wait != 0 {
        cp_async::wait::<0>();
    }
    block::sync_threads();
    st(y.add(i as usize), tile.get(i ^ 2));
}

#[test]
fn an_asynchronous_copy_has_to_be_waited_for() {
    let run = |device: &Device, wait| {
        let x: Vec<U32x4> = (0..64).map(U32x4::splat).collect();
        let (x, y) = (device.upload(&x), device.alloc::<U32x4>(64));
        device.launch(copy_tile, Launch::linear(1, 64).shared(1024), (x.as_ptr(), y.as_mut_ptr(), wait))?;
        Ok(y.to_vec().iter().map(|v| v.w).collect::<Vec<_>>())
    };
    let y = in_every_order(|device| run(device, 1).map_err(|fault: Fault| fault.what));
    assert_eq!(y, Ok((0..64).map(|i| if i % 2 == 0 { i ^ 2 } else { 0 }).collect()));
    let fault = fault_in_every_order(|device| run(device, 0).map(drop));
    assert!(matches!(fault.what, What::Uninitialised { space: Space::Shared, .. }), "{fault}");
}

// Meeting

/// A barrier that only lanes below `limit` reach; the others end if `exit`, else wait at a later one.
#[kernel]
unsafe fn barrier_below(limit: u32, exit: u32) {
    let lane = thread::thread_idx_x();
    if lane < limit {
        block::sync_threads();
    } else if exit == 0 {
        let _ = warp::ballot(true);
    }
}

#[test]
fn a_divergent_barrier_is_reported() {
    let run = |device: &Device, limit, exit| device.launch(barrier_below, Launch::linear(1, 64), (limit, exit));
    assert!(in_every_order(|device| run(device, 64, 1).is_ok()));
    assert!(in_every_order(|device| run(device, 32, 1).is_ok()), "a whole warp may exit");
    let fault = fault_in_every_order(|device| run(device, 40, 1));
    let What::DivergentBarrier { missing: 40.., doing } = &fault.what else { panic!("{fault}") };
    assert_eq!(doing, "has exited");
    let fault = fault_in_every_order(|device| run(device, 40, 0));
    assert!(matches!(fault.what, What::DivergentWarp { collective: "vote", missing: 0, .. }), "{fault}");
}

/// A shuffle after the lanes from `limit` on have exited.
#[kernel]
unsafe fn shuffle_after_exit(y: *mut u32, limit: u32) {
    let lane = thread::thread_idx_x();
    if lane >= limit {
        return;
    }
    st(y.add(lane as usize), warp::shuffle_xor(lane, 1));
}

#[test]
fn a_shuffle_with_an_exited_lane_is_reported() {
    let run = |device: &Device, limit, threads| {
        let y = device.alloc::<u32>(64);
        device.launch(shuffle_after_exit, Launch::linear(1, threads), (y.as_mut_ptr(), limit))
    };
    assert!(in_every_order(|device| run(device, 32, 32).is_ok()));
    let fault = fault_in_every_order(|device| run(device, 31, 32));
    assert_eq!(fault.what, What::ExitedLane { collective: "shuffle_xor", exited: 31 });
    let fault = fault_in_every_order(|device| run(device, 64, 48));
    assert_eq!(fault.what, What::ExitedLane { collective: "shuffle_xor", exited: 16 }, "half a warp");
}

/// Lanes read from lane `from` under the mask of the lower half.
#[kernel]
unsafe fn shuffle_half(y: *mut u32, from: u32) {
    let lane = thread::thread_idx_x();
    if lane < 16 {
        st(y.add(lane as usize), warp::warp_shuffle_idx(0xffff, lane, from, 32).0);
    }
}

#[test]
fn a_shuffle_from_outside_its_mask_is_reported() {
    let run = |device: &Device, from| {
        let y = device.alloc::<u32>(16);
        device.launch(shuffle_half, Launch::linear(1, 32), (y.as_mut_ptr(), from))?;
        Ok(y.to_vec())
    };
    assert_eq!(in_every_order(|device| run(device, 5).map_err(|fault: Fault| fault.what)), Ok(vec![5; 16]));
    let fault = fault_in_every_order(|device| run(device, 16).map(drop));
    assert_eq!(fault.what, What::OutsideMask { collective: "shuffle_idx", mask: 0xffff, lane: 16 });
}

/// Waits for a flag that only another block sets.
#[kernel]
unsafe fn wait_for_flag(flag: *mut u32, setter: u32) {
    if thread::block_idx_x() == 0 && thread::thread_idx_x() == setter {
        atomic::st_release(flag, 1);
    }
    while atomic::ld_acquire(flag) == 0 {}
}

#[test]
fn polling_for_what_never_comes_ends() {
    let run = |device: &Device, setter| {
        let flag = device.zeroed::<u32>(1);
        device.launch(wait_for_flag, Launch::linear(1, 64), (flag.as_mut_ptr(), setter))
    };
    assert!(in_every_order(|device| run(device, 63).is_ok()));
    let fault = fault_in_every_order(|device| run(device, 64));
    assert_eq!(fault.what, What::Stuck);
}

/// Indexes an array of its own past its end.
#[kernel]
unsafe fn index_array(y: *mut u32, i: u32) {
    let squares = [0, 1, 4, 9];
    st(y, squares[i as usize]);
}

#[test]
fn a_panic_in_a_kernel_is_a_fault() {
    let device = Device::new();
    let y = device.alloc::<u32>(1);
    let run = |i| device.launch(index_array, Launch::linear(1, 1), (y.as_mut_ptr(), i));
    assert!(run(3).is_ok());
    let fault = run(4).expect_err("past the end");
    assert!(matches!(&fault.what, What::Panic(text) if text.contains("index out of bounds")), "{fault}");
    assert!(run(2).is_ok(), "the device still works");
    assert_eq!(y.to_vec(), [4]);
}

/// Promises blocks of at most 64 lanes.
#[kernel(max_threads = 64, min_blocks = 2)]
unsafe fn bounded() {}

#[test]
fn launches_that_no_gpu_accepts_are_refused() {
    let device = Device::new();
    assert!(device.launch(bounded, Launch::linear(1, 64), ()).is_ok());
    for launch in [
        Launch::linear(1, 65),
        Launch::linear(0, 32),
        Launch::linear(1, 0),
        Launch::grid([1, 65536, 1], 32),
        Launch::linear(1, 32).shared(228 << 10),
        Launch { block: [u32::MAX; 3], ..Launch::linear(1, 1) },
    ] {
        let fault = device.launch(bounded, launch, ()).expect_err("an impossible launch");
        assert!(matches!(fault.what, What::Launch(_)), "{fault}");
    }
}

// What the instructions compute

/// Every shuffle and vote, one word each.
#[kernel]
unsafe fn collectives(y: *mut u32) {
    let lane = thread::thread_idx_x();
    let results = [
        warp::shuffle_xor(lane, 5),
        warp::shuffle_down(lane, 3),
        warp::shuffle_up(lane, 3),
        warp::shuffle_idx(lane, lane / 2),
        warp::warp_shuffle_down(warp::FULL_MASK, lane, 3, 8).0,
        warp::warp_shuffle_up(warp::FULL_MASK, lane, 3, 8).0,
        warp::warp_shuffle_idx(warp::FULL_MASK, lane, 9, 8).0,
        warp::ballot(lane % 3 == 0),
        u32::from(warp::all(lane < 32)) + 2 * u32::from(warp::any(lane == 31)) + 4 * u32::from(warp::all(lane < 31)),
        warp::sum(lane),
    ];
    for (i, result) in (0..).zip(results) {
        st(y.add(i * 32 + lane as usize), result);
    }
}

#[test]
fn collectives_follow_the_isa() {
    let y = in_every_order(|device| {
        let y = device.alloc::<u32>(320);
        device.launch(collectives, Launch::linear(1, 32), (y.as_mut_ptr(),)).expect("no fault");
        y.to_vec()
    });
    for lane in 0..32 {
        let results: Vec<u32> = (0..10).map(|i| y[i * 32 + lane as usize]).collect();
        let own_if = |inside: bool, from: u32| if inside { from } else { lane };
        let want = [
            lane ^ 5,
            own_if(lane < 29, lane + 3),
            own_if(lane >= 3, lane.wrapping_sub(3)),
            lane / 2,
            own_if(lane % 8 < 5, lane + 3),
            own_if(lane % 8 >= 3, lane.wrapping_sub(3)),
            lane / 8 * 8 + 1,
            0x4924_9249,
            3,
            496,
        ];
        assert_eq!(results, want, "lane {lane}");
    }
}

/// `c[16,8] = a[16,32]·bᵀ[8,32]` in s8: A by `ldmatrix` from shared memory, B from its fragment's definition.
#[kernel]
unsafe fn matmul_s8(a: *const U32x4, b: *const u32, c: *mut i32) {
    let lane = thread::thread_idx_x();
    let (g, t) = (lane / 4, lane % 4);
    let tile = dynamic::<U32x4>(0);
    tile.set(lane, ld(a.add(lane as usize))); // row lane/2, half lane%2
    block::sync_threads();
    // Matrices 0 and 1: rows 0–7 and 8–15 of the first 16 columns; 2 and 3: of the last.
    let row = lane % 8 + 8 * (lane / 8 % 2);
    let a = mma::ldmatrix_x4(tile, row * 2 + lane / 16);
    let b = [ld(b.add((g * 8 + t) as usize)), ld(b.add((g * 8 + 4 + t) as usize))];
    let d = mma::m16n8k32_s8(a, b, [1; 4]);
    for (j, value) in (0..).zip(d) {
        st(c.add(((g + 8 * (j / 2)) * 8 + 2 * t + j % 2) as usize), value);
    }
}

#[test]
fn mma_s8_is_a_matrix_product() {
    let a: Vec<i8> = (0..16 * 32).map(|i| (i * 37 % 251 - 125) as i8).collect();
    let b: Vec<i8> = (0..8 * 32).map(|i| (i * 53 % 241 - 120) as i8).collect();
    let c = in_every_order(|device| {
        let a = device.upload(bytemuck::cast_slice::<_, u8>(&a));
        let b = device.upload(bytemuck::cast_slice::<_, u8>(&b));
        let c = device.alloc::<i32>(16 * 8);
        let args = (a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr());
        device.launch(matmul_s8, Launch::linear(1, 32).shared(512), args).expect("no fault");
        c.to_vec()
    });
    for row in 0..16 {
        for col in 0..8 {
            let dot: i32 = (0..32).map(|k| i32::from(a[row * 32 + k]) * i32::from(b[col * 32 + k])).sum();
            assert_eq!(c[row * 8 + col], dot + 1, "row {row}, column {col}");
        }
    }
}

/// `c[16,8] = a[16,16]·b[16,8]` in f16: both by `ldmatrix`, B, which lies row by row, transposed.
#[kernel]
unsafe fn matmul_f16(a: *const U32x4, b: *const U32x4, c: *mut f32) {
    let lane = thread::thread_idx_x();
    let (g, t) = (lane / 4, lane % 4);
    let (a_tile, b_tile) = (dynamic::<U32x4>(0), dynamic::<U32x4>(512));
    a_tile.set(lane, ld(a.add(lane as usize))); // row lane/2, half lane%2
    if lane < 16 {
        b_tile.set(lane, ld(b.add(lane as usize))); // one row of eight
    }
    block::sync_threads();
    let row = lane % 8 + 8 * (lane / 8 % 2);
    let a = mma::ldmatrix_x4(a_tile, row * 2 + lane / 16);
    let [b0, b1, ..] = mma::ldmatrix_x4_trans(b_tile, lane % 16);
    let d = mma::m16n8k16_f16(a, [b0, b1], [0.5; 4]);
    for (j, value) in (0..).zip(d) {
        st(c.add(((g + 8 * (j / 2)) * 8 + 2 * t + j % 2) as usize), value);
    }
}

#[test]
fn mma_f16_is_a_matrix_product() {
    let f16s = |n: i32, m: i32| (0..n).map(|i| half::f16::from_f32((i * m % 61 - 30) as f32 / 8.0)).collect::<Vec<_>>();
    let (a, b) = (f16s(16 * 16, 23), f16s(16 * 8, 19));
    let c = in_every_order(|device| {
        let (a, b, c) = (device.upload(&a), device.upload(&b), device.alloc::<f32>(16 * 8));
        let args = (a.as_ptr().cast(), b.as_ptr().cast(), c.as_mut_ptr());
        device.launch(matmul_f16, Launch::linear(1, 32).shared(768), args).expect("no fault");
        c.to_vec()
    });
    for row in 0..16 {
        for col in 0..8 {
            let dot: f32 = (0..16).map(|k| a[row * 16 + k].to_f32() * b[k * 8 + col].to_f32()).sum();
            assert_eq!(c[row * 8 + col], dot + 0.5, "row {row}, column {col}: multiples of 1/64, hence exact");
        }
    }
}

// A kernel of ours

/// Sizes that break tiles, and the reference model's.
const RMS_NORM_SHAPES: [(u32, u32); 8] = [(1, 4), (3, 124), (2, 128), (5, 132), (3, 1020), (2, 1028), (7, 2048), (32, 256)];

#[test]
fn rms_norm_matches_its_equation() {
    use gpu_kernels::kernels::rms_norm::{RMS_NORM_SHARED_BYTES, RMS_NORM_THREADS, rms_norm};
    const EPS: f32 = 1e-6;
    for (rows, n) in RMS_NORM_SHAPES {
        let value = |i: u32, m: u32| (i.wrapping_mul(m) % 2003) as f32 / 500.0 - 2.0;
        let x: Vec<f32> = (0..rows * n).map(|i| value(i, 7919)).collect();
        let w: Vec<f32> = (0..n).map(|i| value(i, 104_729)).collect();
        let launch = Launch::linear(rows, RMS_NORM_THREADS).shared(RMS_NORM_SHARED_BYTES);
        let y = in_every_order(|device| {
            let (x, w) = (device.upload(&x), device.upload(&w));
            let y = device.alloc::<f32>(x.len());
            device.launch(rms_norm, launch, (x.as_ptr(), w.as_ptr(), y.as_mut_ptr(), n, EPS)).expect("no fault");
            // In place.
            device.launch(rms_norm, launch, (x.as_ptr(), w.as_ptr(), x.as_mut_ptr(), n, EPS)).expect("no fault");
            assert_eq!(x.to_vec(), y.to_vec());
            y.to_vec()
        });
        for (row, (x, y)) in x.chunks(n as usize).zip(y.chunks(n as usize)).enumerate() {
            let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / f64::from(n);
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            // A lane sums up to n/256 rounding errors and the trees add 10; the root halves the relative error;
            // then come two products and the approximate root.
            let bound = (f64::from(n / 256 + 10) / 2.0 + 4.0) * f64::from(f32::EPSILON) / 2.0;
            for (i, (&x, &y)) in x.iter().zip(y).enumerate() {
                let want = f64::from(x) * scale * f64::from(w[i]);
                let error = (f64::from(y) - want).abs();
                assert!(error <= bound * want.abs(), "{rows}×{n}, row {row}, column {i}: {y}, want {want}, bound {bound:e}");
            }
        }
    }
}
