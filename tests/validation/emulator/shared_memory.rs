//! Faults planted in the use of shared memory. Most of them pass unseen on a GPU most of the time.

#![allow(unsafe_code, reason = "kernels are unsafe functions; these are run by the emulator only")]

use cuda_std::cp_async;
use cuda_std::emu::{Access, Device, Fault, Space, What};
use cuda_std::launch::Launch;
use cuda_std::prelude::*;

use super::{ORDERS, fault_in_every_order, in_every_order};

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
            assert!(
                matches!(fault.what, What::Race { .. } | What::Uninitialised { space: Space::Shared, .. }),
                "{fault}"
            );
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
    assert!(
        matches!(fault.what, What::OutOfBounds { space: Space::Shared, access: Access::Write, address: 252, .. }),
        "{fault}"
    );
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
    cp_async::copy_16_or_zero(tile, i, x.add(i as usize), i.is_multiple_of(2));
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
