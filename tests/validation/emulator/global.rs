//! Faults planted in accesses to global memory.

#![allow(unsafe_code, reason = "kernels are unsafe functions; these are run by the emulator only")]

use cuda_std::emu::{Access, Device, Space, What};
use cuda_std::launch::Launch;
use cuda_std::prelude::*;

use super::fault_in_every_order;

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
