//! What each instruction computes, on the emulated device and, with `ZINC_GPU=1`, on a GPU: the same checks,
//! from the ISA's definitions. An emulator that differs from the GPU here would prove nothing elsewhere.

#![allow(unsafe_code, reason = "launches")]

use bytemuck::Pod;
use cuda_std::emu::Order;
use cuda_std::launch::{Kernel, Launch};
use cuda_std::{F32x2, U32x4};
use gpu_kernels::kernels::conformance::*;
use half::{bf16, f16};
use host::cuda::{CudaDevice, KernelSource, Selector};
use host::gpu::{Buffer, Device, Emulated};

/// Runs `check(&device)` on every device there is.
macro_rules! on_devices {
    ($check:ident) => {
        for order in [Order::Forward, Order::Backward, Order::Shuffled(1)] {
            $check(&Emulated::with_order(order));
        }
        if std::env::var_os("ZINC_GPU").is_some_and(|value| value == "1") {
            $check(&CudaDevice::open(&Selector::MostFree, &KernelSource::Embedded).expect("ZINC_GPU=1 wants a GPU"));
        } else {
            println!("skipped: the GPU (ZINC_GPU=1 asks for it)");
        }
    };
}

/// Launches a kernel of this file and waits for it.
fn launch<D: Device, K: Kernel>(device: &D, kernel: K, launch: Launch, args: K::Args) {
    // SAFETY: each caller passes the shape and the extents that the kernel's list asks for.
    unsafe { device.launch(kernel, launch, args) }.expect("a launch");
    device.synchronize().expect("no fault");
}

fn upload<D: Device, T: Pod>(device: &D, values: &[T]) -> Buffer<D, T> {
    device.alloc_from(values).expect("memory")
}

fn download<D: Device, T: Pod>(device: &D, buffer: &Buffer<D, T>) -> Vec<T> {
    device.download_vec(buffer.slice()).expect("a download")
}

/// A block's barriers are met by all of its lanes, also where some of them have nothing to do before and after.
#[test]
fn a_block_meets_between_two_branches() {
    fn check<D: Device>(device: &D) {
        let values: Vec<f32> = (0..37u8).map(|i| f32::from(i * 7 % 37)).collect();
        let (x, y) = (upload(device, &values), device.alloc_zeroed::<f32>(values.len()).expect("memory"));
        let args = (x.slice().ptr(), y.slice().ptr_mut(), values.len() as u32);
        launch(device, conformance_between_branches, Launch::linear(1, 64).shared(8), args);
        assert_eq!(download(device, &y), [36.0; 37]);
    }
    on_devices!(check);
}

#[test]
fn collectives_follow_the_isa() {
    fn check<D: Device>(device: &D) {
        let y = device.alloc_zeroed::<u32>(N_COLLECTIVES * 32).expect("memory");
        launch(device, conformance_collectives, Launch::linear(1, 32), (y.slice().ptr_mut(),));
        let y = download(device, &y);
        for lane in 0..32u32 {
            let results: Vec<u32> = y.iter().skip(lane as usize).step_by(32).copied().collect();
            let own_if_outside = |inside: bool, from: u32| if inside { from } else { lane };
            let want = [
                lane ^ 5,
                own_if_outside(lane < 29, lane + 3),
                own_if_outside(lane >= 3, lane.wrapping_sub(3)),
                lane / 2,
                own_if_outside(lane % 8 < 5, lane + 3),
                own_if_outside(lane % 8 >= 3, lane.wrapping_sub(3)),
                lane / 8 * 8 + 1,
                0x4924_9249, // every third lane
                3,
                496, // 0 + 1 + … + 31
                28,
                100,
            ];
            assert_eq!(results, want, "lane {lane}");
        }
    }
    on_devices!(check);
}

#[test]
fn mma_s8_is_a_matrix_product() {
    fn check<D: Device>(device: &D) {
        let a: Vec<i8> = (0..16 * 32).map(|i| (i * 37 % 251 - 125) as i8).collect();
        let b: Vec<i8> = (0..8 * 32).map(|i| (i * 53 % 241 - 120) as i8).collect();
        let (a_dev, b_dev) = (upload(device, &a), upload(device, &b));
        let c = device.alloc_zeroed::<i32>(16 * 8).expect("memory");
        let args = (a_dev.slice().ptr().cast(), b_dev.slice().ptr().cast(), c.slice().ptr_mut());
        launch(device, conformance_mma_s8, Launch::linear(1, 32).shared(512), args);
        let c = download(device, &c);
        for (row, col) in (0..16).flat_map(|row| (0..8).map(move |col| (row, col))) {
            let dot: i32 = (0..32).map(|k| i32::from(a[row * 32 + k]) * i32::from(b[col * 32 + k])).sum();
            assert_eq!(c[row * 8 + col], dot + 1, "row {row}, column {col}");
        }
    }
    on_devices!(check);
}

#[test]
fn mma_16bit_is_a_matrix_product() {
    fn check<D: Device>(device: &D) {
        // Multiples of 1/8 below 4: all products and sums are exact, in any order.
        let values = |n: i32, m: i32| (0..n).map(|i| (i * m % 61 - 30) as f32 / 8.0).collect::<Vec<_>>();
        let (a, b) = (values(16 * 16, 23), values(16 * 8, 19));
        for is_bf16 in [false, true] {
            let bits = |v: &f32| if is_bf16 { bf16::from_f32(*v).to_bits() } else { f16::from_f32(*v).to_bits() };
            let a_dev = upload(device, &a.iter().map(bits).collect::<Vec<u16>>());
            let b_dev = upload(device, &b.iter().map(bits).collect::<Vec<u16>>());
            let c = device.alloc_zeroed::<f32>(16 * 8).expect("memory");
            let (a_ptr, b_ptr) = (a_dev.slice().ptr().cast(), b_dev.slice().ptr().cast());
            let args = (a_ptr, b_ptr, c.slice().ptr_mut(), u32::from(is_bf16));
            launch(device, conformance_mma_16bit, Launch::linear(1, 32).shared(768), args);
            let c = download(device, &c);
            for (row, col) in (0..16).flat_map(|row| (0..8).map(move |col| (row, col))) {
                let dot: f32 = (0..16).map(|k| a[row * 16 + k] * b[k * 8 + col]).sum();
                assert_eq!(c[row * 8 + col], dot + 0.5, "row {row}, column {col}, bf16: {is_bf16}");
            }
        }
    }
    on_devices!(check);
}

/// A function of `math`: its value, the arguments it is for, its error and what that is relative to.
struct Function {
    name: &'static str,
    exact: fn(f64) -> f64,
    range: [f64; 2],
    error: f64,
    /// The error's unit at an exact value: the value itself, or 1 for an absolute error.
    unit: fn(f64) -> f64,
}

/// As `cuda_std::math` documents them, in the order of [`conformance_math`].
fn functions() -> [Function; N_MATH] {
    fn relative(y: f64) -> f64 {
        y.abs().max(f64::from(f32::MIN_POSITIVE))
    }
    fn absolute(_: f64) -> f64 {
        1.0
    }
    let function = |name, exact, range, error, unit| Function { name, exact, range, error, unit };
    let half_ulp = 6e-8; // correctly rounded
    [
        function("exp", f64::exp, [-87.0, 88.7], 3e-7, relative),
        function("exp2_approx", f64::exp2, [-126.0, 127.9], 2.4e-7, relative),
        function("log", f64::ln, [1e-6, 1e30], 1.5e-7, relative),
        function("log2_approx", f64::log2, [0.5, 2.0], 2.4e-7, absolute),
        function("softplus", |x| if x > 40.0 { x } else { x.exp().ln_1p() }, [-80.0, 80.0], 5e-7, relative),
        function("sigmoid", |x| 1.0 / (1.0 + (-x).exp()), [-80.0, 80.0], 5e-7, relative),
        function("silu", |x| x / (1.0 + (-x).exp()), [-80.0, 80.0], 6e-7, relative),
        function("tanh", f64::tanh, [-40.0, 40.0], 3e-7, relative),
        function("tanh_approx", f64::tanh, [-40.0, 40.0], 5e-4, relative),
        function("sin", f64::sin, [-1e9, 1e9], 1.3e-7, absolute),
        function("cos", f64::cos, [-1e9, 1e9], 1.3e-7, absolute),
        function("sqrt", f64::sqrt, [0.0, 1e30], half_ulp, relative),
        function("rsqrt", |x| 1.0 / x.sqrt(), [1e-30, 1e30], 1.3e-7, relative),
        function("rcp", |x| 1.0 / x, [1e-30, 1e30], 1.2e-7, relative),
        function("rint", f64::round_ties_even, [-1e9, 1e9], 0.0, absolute),
        function("round_to_i32", f64::round_ties_even, [-2e9, 2e9], half_ulp, relative),
        function("max − min", |x| (x - 1.0).abs(), [-1e30, 1e30], half_ulp, relative),
        function("fma", |x| x * x + 1.5, [-1e15, 1e15], half_ulp, relative),
    ]
}

#[test]
fn math_has_the_errors_it_documents() {
    fn check<D: Device>(device: &D) {
        // Evenly spaced values of several magnitudes, halves among them.
        let spans = [(1.0f32, 0.0f32), (8.0, -4.0), (180.0, -90.0), (2e4, -1e4), (2e6, -1e6), (2e9, -1e9), (1e25, 1.0)];
        let sweep = |(width, from): (f32, f32)| (0..2048).map(move |i| from + width * (i as f32 / 2048.0));
        let x: Vec<f32> = spans.into_iter().flat_map(sweep).collect();
        let n = u32::try_from(x.len()).expect("a few thousand");
        let (x_dev, y) = (upload(device, &x), device.alloc_zeroed::<f32>(N_MATH * x.len()).expect("memory"));
        let args = (x_dev.slice().ptr(), y.slice().ptr_mut(), n);
        launch(device, conformance_math, Launch::linear(n.div_ceil(THREADS), THREADS), args);
        let y = download(device, &y);
        for (function, y) in functions().iter().zip(y.chunks(x.len())) {
            let [low, high] = function.range;
            let mut checked = 0;
            for (&x, &y) in x.iter().zip(y).filter(|(x, _)| (low..=high).contains(&f64::from(**x))) {
                let want = (function.exact)(f64::from(x));
                let error = (f64::from(y) - want).abs() / (function.unit)(want);
                assert!(error <= function.error, "{}({x}) = {y}, want {want}: off by {error:e}", function.name);
                checked += 1;
            }
            assert!(checked > 1000, "{}: {checked} arguments", function.name);
        }
    }
    on_devices!(check);
}

#[test]
fn wgmma_is_a_matrix_product() {
    fn check<D: Device>(device: &D) {
        if !device.properties().wgmma {
            println!("skipped: {} has no wgmma", device.properties().name);
            return;
        }
        // Small integers: exact in any order.
        let value = |i: usize, factor: usize| bf16::from_f32((i * factor % 251) as f32 - 125.0);
        let a: Vec<u16> = (0..64 * 64).map(|i| value(i, 37).to_bits()).collect();
        let b: Vec<u16> = (0..128 * 64).map(|i| value(i, 53).to_bits()).collect();
        let (a_dev, b_dev) = (upload(device, &a), upload(device, &b));
        let c = device.alloc_zeroed::<f32>(64 * 128).expect("memory");
        let args = (a_dev.slice().ptr().cast(), b_dev.slice().ptr().cast(), c.slice().ptr_mut());
        launch(device, conformance_wgmma, Launch::linear(1, 128).shared(16 << 10), args);
        let c = download(device, &c);
        for row in 0..64 {
            for column in 0..128 {
                let product = |k| value(row * 64 + k, 37).to_f32() * value(column * 64 + k, 53).to_f32();
                let want: f32 = (0..64).map(product).sum();
                assert_eq!(c[row * 128 + column], want, "row {row}, column {column}");
            }
        }
    }
    on_devices!(check);
}

/// The definition of `prmt`, byte by byte.
fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let bytes: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
    let byte = |i: u32| {
        let nibble = selector >> (4 * i) & 15;
        let byte = bytes[(nibble % 8) as usize];
        let sign = if byte >= 128 { 255 } else { 0 };
        u32::from(if nibble < 8 { byte } else { sign }) << (8 * i)
    };
    byte(0) | byte(1) | byte(2) | byte(3)
}

/// Whether `got` is `a·b + c`, rounded once.
fn is_fma_bf16(got: bf16, [a, b, c]: [f64; 3]) -> bool {
    let product = a * b; // exact: 16 bits
    let sum = product + c;
    let near = bf16::from_f64(sum);
    let same = |want: bf16| got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
    if !near.is_finite() || near.to_f64() == 0.0 {
        return same(near);
    }
    // The nearest of three neighbours, for `from_f64` does not see all of a number. Of two as near the even one, unless
    // an f64 does not hold the sum: then it may be either.
    let distance = |bits: u16| (bf16::from_bits(bits).to_f64() - sum).abs();
    let neighbours = [near.to_bits() - 1, near.to_bits(), near.to_bits() + 1];
    let least = neighbours.map(distance).into_iter().fold(f64::INFINITY, f64::min);
    let nearest: Vec<u16> = neighbours.into_iter().filter(|bits| distance(*bits) <= least).collect();
    let exact = sum - product == c && sum - c == product;
    nearest.contains(&got.to_bits()) && (nearest.len() == 1 || !exact || got.to_bits().is_multiple_of(2))
}

#[test]
fn conversions_and_byte_operations_are_exact() {
    fn check<D: Device>(device: &D) {
        // Every 16-bit pattern in the low half; in the high half something of every exponent.
        let x: Vec<u32> = (0..1 << 16).map(|i: u32| i | i.wrapping_mul(0x9e37) << 16).collect();
        let w: Vec<u32> = (0..1 << 16).map(|i: u32| i.wrapping_mul(0x85eb_ca6b).rotate_left(9)).collect();
        let y = device.alloc_zeroed::<u32>(N_CONVERT * x.len()).expect("memory");
        let (x_dev, w_dev) = (upload(device, &x), upload(device, &w));
        let args = (x_dev.slice().ptr(), w_dev.slice().ptr(), y.slice().ptr_mut(), 1 << 16);
        launch(device, conformance_convert, Launch::linear((1 << 16) / THREADS, THREADS), args);
        let y = download(device, &y);
        for (i, (&bits, &other)) in x.iter().zip(&w).enumerate() {
            let result = |k: usize| y[k * x.len() + i];
            let float = f32::from_bits(bits);
            let (h, b) = (f16::from_bits(bits as u16), bf16::from_bits(bits as u16));
            // A NaN stays one; its payload is nobody's business.
            let same_f32 = |k, want: f32| {
                let got = f32::from_bits(result(k));
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{k}: {bits:#x}: {got}");
            };
            let same_half = |k, want: u16, nan: bool, is_nan: fn(u16) -> bool| {
                let got = result(k) as u16;
                assert!(got == want || nan && is_nan(got), "{k}: {bits:#x}: {got:#x}, want {want:#x}");
            };
            same_f32(0, h.to_f32());
            same_f32(1, b.to_f32());
            for k in [2, 4] {
                same_half(k, f16::from_f32(float).to_bits(), float.is_nan(), |h| f16::from_bits(h).is_nan());
            }
            for k in [3, 5] {
                same_half(k, bf16::from_f32(float).to_bits(), float.is_nan(), |h| bf16::from_bits(h).is_nan());
            }
            assert_eq!([result(4) >> 16, result(5) >> 16], [0x4000, 0x4000], "2.0 in the upper half");
            let (a, signed) = (bits.to_le_bytes(), other.to_le_bytes().map(u8::cast_signed));
            let dot = |value: fn(u8) -> i32| (0..4).map(|j| value(a[j]) * i32::from(signed[j])).sum::<i32>() + 7;
            assert_eq!(result(6).cast_signed(), dot(|byte| i32::from(byte.cast_signed())), "dp4a");
            assert_eq!(result(7).cast_signed(), dot(i32::from), "dp4a_us");
            assert_eq!(result(8), prmt(bits, other, 0x3175), "prmt");
            assert_eq!(result(9), prmt(bits, other, 0xfb80), "prmt");
            assert_eq!(result(10), bits.swap_bytes(), "pack and unpack");
            assert_eq!(result(11), prmt(bits, other, other >> 7), "prmt");
            for shift in [0, 16] {
                let half = |x: u32| bf16::from_bits((x >> shift) as u16);
                let (factors, got) = ([bits, other, bits.rotate_left(7)].map(|x| half(x).to_f64()), half(result(12)));
                assert!(is_fma_bf16(got, factors), "fma of {factors:?} is not {got}");
            }
        }
    }
    on_devices!(check);
}

#[test]
fn block_reductions_and_barriers_count_every_lane() {
    fn check<D: Device>(device: &D) {
        let x: Vec<f32> = (0..THREADS).map(|i| (i * 37 % 101) as f32 / 64.0).collect();
        let y = device.alloc_zeroed::<F32x2>(x.len()).expect("memory");
        let counts = device.alloc_zeroed::<U32x4>(x.len()).expect("memory");
        let x_dev = upload(device, &x);
        let args = (x_dev.slice().ptr(), y.slice().ptr_mut(), counts.slice().ptr_mut());
        launch(device, conformance_block, Launch::linear(1, THREADS).shared(32), args);
        // Multiples of 1/64: the sum is exact in any order.
        let want = F32x2 { x: x.iter().sum(), y: x.iter().copied().fold(0.0, f32::max) };
        assert!(download(device, &y).iter().all(|y| *y == want));
        let above = u32::try_from(x.iter().filter(|x| **x > 0.5).count()).expect("at most 256");
        assert!(download(device, &counts).iter().all(|c| *c == U32x4 { x: above, y: 0, z: 1, w: 1 }));
    }
    on_devices!(check);
}

#[test]
fn atomics_lose_no_addition() {
    fn check<D: Device>(device: &D) {
        const BLOCKS: u32 = 50;
        const LANES: u32 = BLOCKS * THREADS;
        let counters = device.alloc_zeroed::<u32>(5).expect("memory");
        let sums = device.alloc_zeroed::<f32>(2).expect("memory");
        let wide = device.alloc_zeroed::<u64>(1).expect("memory");
        let last = device.alloc_zeroed::<u32>(3).expect("memory");
        let (wide_ptr, last_ptr) = (wide.slice().ptr_mut(), last.slice().ptr_mut());
        let args = (counters.slice().ptr_mut(), sums.slice().ptr_mut(), wide_ptr, last_ptr);
        launch(device, conformance_atomics, Launch::linear(BLOCKS, THREADS).shared(8), args);
        assert_eq!(download(device, &counters), [LANES, 2 * LANES, 3 * LANES, LANES - 1, 78]);
        assert_eq!(download(device, &sums), [LANES as f32, 2.0 * LANES as f32], "small integers are exact");
        assert_eq!(download(device, &wide), [u64::from(LANES) << 32 | u64::from(LANES)]);
        assert_eq!(download(device, &last), [LANES, 2 * THREADS + THREADS / 2, BLOCKS + 77]);
    }
    on_devices!(check);
}

#[test]
fn every_kind_of_load_reads_the_same() {
    fn check<D: Device>(device: &D) {
        let x: Vec<U32x4> =
            (0..THREADS).map(|i| U32x4 { x: i, y: 1000 + i, z: 70_000 + i, w: 1_000_000 * i }).collect();
        let (x_dev, y) = (upload(device, &x), device.alloc_zeroed::<U32x4>(x.len()).expect("memory"));
        let args = (x_dev.slice().ptr(), y.slice().ptr_mut());
        launch(device, conformance_loads, Launch::linear(1, THREADS).shared(20 * THREADS), args);
        for (lane, y) in (0u32..).zip(download(device, &y)) {
            let own = x[lane as usize];
            let copied = if (lane ^ 1).is_multiple_of(3) { U32x4::default() } else { x[(lane ^ 1) as usize] };
            let word = if (lane ^ 1).is_multiple_of(5) { 0 } else { x[(lane ^ 1) as usize].w };
            let want = U32x4 {
                x: 3 * own.x + copied.x + (copied.x & 0xffff),
                y: 3 * own.y + copied.y,
                z: 3 * own.z + copied.z,
                w: 3 * own.w + copied.w + word,
            };
            assert_eq!(y, want, "lane {lane}");
        }
    }
    on_devices!(check);
}
