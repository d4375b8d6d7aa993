//! Faults planted where lanes meet: barriers, shuffles, polling; panics and impossible launches.

#![allow(unsafe_code, reason = "kernels are unsafe functions; these are run by the emulator only")]

use cuda_std::atomic;
use cuda_std::emu::{Device, Fault, What};
use cuda_std::launch::Launch;
use cuda_std::mma;
use cuda_std::prelude::*;

use super::{fault_in_every_order, in_every_order};

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

/// A matrix product after the lanes from `limit` on have exited; its tile starts at element `start`.
#[kernel]
unsafe fn matrices_after_exit(y: *mut u32, limit: u32, start: u32) {
    let lane = thread::thread_idx_x();
    let tile = dynamic::<u32>(0);
    tile.set(lane, lane);
    for i in 1..5 {
        tile.set(lane + 32 * i, lane);
    }
    block::sync_threads(); // the tile is whole before its rows are loaded
    if lane >= limit {
        return;
    }
    let a = if start == u32::MAX { [lane; 4] } else { mma::ldmatrix_x4(tile, start + 4 * lane) };
    let d = mma::m16n8k32_s8(a, [lane; 2], [0; 4]);
    st(y.add(lane as usize), d[0].cast_unsigned());
}

#[test]
fn matrix_instructions_without_the_whole_warp_or_aligned_rows_are_reported() {
    let run = |device: &Device, limit, start| {
        let y = device.alloc::<u32>(32);
        let launch = Launch { shared_bytes: 640, ..Launch::linear(1, 32) };
        device.launch(matrices_after_exit, launch, (y.as_mut_ptr(), limit, start))
    };
    assert!(in_every_order(|device| run(device, 32, 0).is_ok()));
    let fault = fault_in_every_order(|device| run(device, 31, u32::MAX));
    assert_eq!(fault.what, What::ExitedLane { collective: "mma.m16n8k32.s8", exited: 31 });
    let fault = fault_in_every_order(|device| run(device, 20, 0));
    assert_eq!(fault.what, What::ExitedLane { collective: "ldmatrix", exited: 20 });
    // Rows are 16 bytes at multiples of 16.
    let fault = fault_in_every_order(|device| run(device, 32, 1));
    assert!(matches!(fault.what, What::Misaligned { .. }), "{fault}");
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
