//! How fast the emulator is: `cargo run --example emulator_speed -p cuda_std`.
//!
//! Three kernels: global loads, shared memory with barriers, and shuffles.

use cuda_std::emu::Device;
use cuda_std::launch::Launch;
use cuda_std::prelude::*;
use std::num::NonZero;
use std::time::Instant;

/// `y[lane] = Σ_k w[lane, k]·x[k]`: two loads a step, lanes in step.
///
/// # Safety
/// `w [lanes, k]`, `x [k]`, `y [lanes]` for the lanes of the grid.
#[kernel]
pub unsafe fn dot_rows(w: *const f32, x: *const f32, y: *mut f32, k: u32) {
    let row = thread::index_1d() as usize;
    let mut sum = 0.0;
    for i in 0..k as usize {
        sum += ld(w.add(row * k as usize + i)) * ld(x.add(i));
    }
    st(y.add(row), sum);
}

/// Passes a value round the block, `steps` times.
///
/// # Safety
/// `y` has an element for each lane of the block; a word of shared memory each.
#[kernel]
pub unsafe fn pass_round(y: *mut u32, steps: u32) {
    let (i, n) = (thread::thread_idx_x(), thread::block_dim_x());
    let tile = dynamic::<u32>(0);
    let mut v = i;
    for _ in 0..steps {
        tile.set(i, v);
        block::sync_threads();
        v = tile.get((i + 1) % n);
        block::sync_threads();
    }
    st(y.add(i as usize), v);
}

/// Sums over the warp, `steps` times.
///
/// # Safety
/// `y` has an element for each lane of the grid.
#[kernel]
pub unsafe fn warp_sums(y: *mut u32, steps: u32) {
    let mut v = thread::index_1d();
    for _ in 0..steps {
        v = warp::sum(v) & 0xff;
    }
    st(y.add(thread::index_1d() as usize), v);
}

fn main() -> Result<(), cuda_std::emu::Fault> {
    let device = Device::new().threads(NonZero::<usize>::MIN);
    let time = |what: &str, events: f64, run: &dyn Fn() -> Result<(), cuda_std::emu::Fault>| {
        run()?;
        let start = Instant::now();
        run()?;
        let seconds = start.elapsed().as_secs_f64();
        println!("{what}: {:.1} M/s on one thread", events / seconds / 1e6);
        Ok(())
    };
    let (lanes, k) = (8192u32, 512u32);
    let w = device.upload(&vec![1.0f32; (lanes * k) as usize]);
    let x = device.upload(&vec![1.0f32; k as usize]);
    let y = device.alloc::<f32>(lanes as usize);
    let out = device.alloc::<u32>(lanes as usize);
    let loads = 2.0 * f64::from(lanes) * f64::from(k);
    time("global loads", loads, &|| {
        let args = (w.as_ptr(), x.as_ptr(), y.as_mut_ptr(), k);
        device.launch(dot_rows, Launch::linear(lanes / 256, 256), args)
    })?;
    time("shared accesses with a barrier each", 2.0 * 256.0 * 1000.0, &|| {
        device.launch(pass_round, Launch::linear(1, 256).shared(1024), (out.as_mut_ptr(), 1000))
    })?;
    time("shuffles", 5.0 * 8192.0 * 20.0, &|| {
        device.launch(warp_sums, Launch::linear(32, 256), (out.as_mut_ptr(), 20))
    })
}
