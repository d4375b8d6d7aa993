//! The driver layer and the device trait, without a GPU: what a machine that has none is told, what is
//! decided from texts and lists, and everything that [`host::gpu::Device`] promises, on the emulator.
//!
//! Launching is what is tested here, so this file holds launches of its own, which tests otherwise leave
//! to the launchers in `host`.

use std::ffi::c_void;

use cuda_std::launch::{Kernel, KernelArgs, Launch};
use cuda_std::mem::{ld, st};
use cuda_std::{kernel, thread};
use host::cli::check::{self, CheckArgs, CheckedDevice};
use host::cuda::module::{Image, KernelSource, choose};
use host::cuda::ptx::{Header, PtxError, PtxVersion, Reach, Target, check_version, newest_for};
use host::cuda::{self, CudaVersion, DeviceInfo, Selector};
use host::gpu::self_test::{self, Scale};
use host::gpu::{Buffer, Device, DeviceError, Emulated, MemoryInfo, Properties, Ring, Slice, Staging};

const PTX: &str = "//\n.version 8.0\n.target sm_90, debug\n.address_size 64\n\
    .visible .entry rms_norm(\n.param .u64 x\n)\n{ ret; }\n.entry add (.param .u64 y) { ret; } // .entry not_this\n";

/// `y[i] = a·x[i] + y[i]`.
///
/// # Safety
/// `x` and `y` have `n` elements, and the grid at least as many lanes.
#[kernel]
pub unsafe fn axpy(a: f32, x: *const f32, y: *mut f32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        let i = i as usize;
        st(y.add(i), a * ld(x.add(i)) + ld(y.add(i)));
    }
}

#[expect(unsafe_code, reason = "a launch")]
fn launch_axpy<D: Device>(device: &D, a: f32, x: Slice<'_, f32>, y: Slice<'_, f32>) -> Result<(), DeviceError> {
    x.check_len("x", y.len())?;
    let launch = Launch::linear(y.len().div_ceil(64) as u32, 64);
    // SAFETY: both have as many elements, and the grid covers them.
    unsafe { device.launch(axpy, launch, (a, x.ptr(), y.ptr_mut(), y.len() as u32)) }
}

fn version(major: u32, minor: u32) -> CudaVersion {
    CudaVersion { major, minor }
}

fn ptx(major: u32, minor: u32) -> PtxVersion {
    PtxVersion { major, minor }
}

#[test]
fn a_machine_without_a_driver_is_told_so() {
    let mut out = Vec::new();
    let ready = check::run(&CheckArgs::default(), &mut out).expect("writing to memory");
    let out = String::from_utf8(out).expect("text");
    println!("{out}");
    let last = out.lines().last().unwrap_or_default();
    match cuda::load() {
        Ok(_) => assert!(ready || last.starts_with("NOT READY: "), "{out}"),
        Err(error) => {
            assert!(!ready && last.starts_with("NOT READY: "), "{out}");
            assert!(!error.to_string().contains('\n'));
            if matches!(error, cuda::Error::NoDriver { .. }) && !out.contains("no GPU kernels") {
                assert!(last.contains("no NVIDIA driver") && last.contains("libcuda.so.1"), "{last}");
                assert!(last.contains("--device cpu"), "it says what works instead: {last}");
            }
        }
    }
}

#[test]
fn check_is_ready_on_the_emulated_device() {
    let mut out = Vec::new();
    let args = CheckArgs { device: CheckedDevice::Emulated, ..CheckArgs::default() };
    let ready = check::run(&args, &mut out).expect("writing to memory");
    let out = String::from_utf8(out).expect("text");
    assert!(ready, "{out}");
    for step in
        ["memory", "copies", "launch", "events", "graph", "staging", "readback", "profile", "exact", "int8", "READY"]
    {
        assert!(out.lines().any(|line| line.starts_with(step)), "no {step} in:\n{out}");
    }
}

#[test]
fn check_refuses_a_model_that_is_not_there() {
    let args =
        CheckArgs { device: CheckedDevice::Emulated, model: Some("no/such/model.gguf".into()), ..CheckArgs::default() };
    let mut out = Vec::new();
    assert!(!check::run(&args, &mut out).expect("writing to memory"));
    let out = String::from_utf8(out).expect("text");
    assert!(out.contains("NOT READY: no/such/model.gguf: "), "{out}");
}

/// B47: what a model needs is said before it is loaded, part by part.
#[test]
fn check_says_what_a_model_needs_and_whether_it_fits() {
    let check = |ctx| {
        let model = Some(crate::checkout::zinc_tiny());
        let args = CheckArgs { device: CheckedDevice::Emulated, model, ctx, ..CheckArgs::default() };
        let mut out = Vec::new();
        let ready = check::run(&args, &mut out).expect("writing to memory");
        (ready, String::from_utf8(out).expect("text"))
    };
    let (ready, out) = check(Some(128));
    assert!(ready, "{out}");
    for part in ["weights", "KV cache", "state", "activations", "with a context of 128 tokens"] {
        assert!(out.contains(part), "no {part} in:\n{out}");
    }
    let (ready, out) = check(Some(100_000_000));
    let last = out.lines().last().unwrap_or_default();
    assert!(!ready && last.starts_with("NOT READY: a context of 100000000 tokens needs "), "{out}");
    assert!(last.contains("GiB are free"), "{out}");
}

#[test]
fn a_ptx_header_is_read_from_its_text() {
    let header = Header::parse(PTX).expect("PTX");
    assert_eq!(header.version, ptx(8, 0));
    assert_eq!(header.target, Target { capability: (9, 0), reach: Reach::Onward });
    assert_eq!(header.entries, [c"rms_norm".to_owned(), c"add".to_owned()]);
    for broken in ["", ".version 8.0", ".target sm_90", ".version eight\n.target sm_90", ".version 8.0\n.target sm_"] {
        assert!(matches!(Header::parse(broken), Err(PtxError::Malformed(_))), "{broken:?}");
    }
    assert!(Header::parse(&PTX.replace("rms_norm(", "(")).is_err(), "an entry without a name");
}

/// B44: PTX that the driver is too old for.
#[test]
fn ptx_newer_than_the_driver_is_one_line_that_names_both() {
    let wanted = Header::parse(&PTX.replace("8.0", "99.0")).expect("PTX").version;
    for driver in [version(11, 8), version(13, 0), version(14, 2)] {
        let error = check_version(wanted, driver).expect_err("no driver takes 99.0").to_string();
        assert!(error.contains("99.0") && error.contains(&driver.to_string()), "{error}");
        assert!(!error.contains('\n'));
    }
    let error = check_version(ptx(9, 0), version(12, 4)).expect_err("too new").to_string();
    assert!(error.contains("PTX goes up to 8.4") && error.contains("CUDA 13.0 or later"), "{error}");
}

#[test]
fn ptx_versions_go_with_cuda_releases() {
    assert_eq!(newest_for(version(13, 0)), Some(ptx(9, 0)));
    assert_eq!(newest_for(version(12, 6)), Some(ptx(8, 5)));
    assert_eq!(newest_for(version(11, 4)), Some(ptx(7, 4)));
    assert_eq!(newest_for(version(99, 0)), None);
    assert!(check_version(ptx(9, 0), version(13, 0)).is_ok());
    assert!(check_version(ptx(7, 0), version(12, 0)).is_ok());
    assert!(check_version(ptx(10, 3), version(14, 0)).is_ok(), "left to a driver newer than the table");
}

fn image(target: &str, ptx_version: &str) -> Image {
    let text = PTX.replace("sm_90, debug", target).replace("8.0", ptx_version);
    Image::new(target.to_owned(), text).expect("PTX")
}

#[test]
fn the_newest_target_that_a_device_and_driver_take_is_chosen() {
    let images = ["sm_120", "sm_80", "sm_90", "sm_89", "sm_90a", "sm_100f"].map(|target| image(target, "8.0"));
    let chosen = |capability| choose(&images, capability, version(13, 0)).map(|image| image.origin.as_str());
    assert_eq!(chosen((8, 0)), Ok("sm_80"));
    assert_eq!(chosen((8, 6)), Ok("sm_80"));
    assert_eq!(chosen((8, 9)), Ok("sm_89"));
    assert_eq!(chosen((9, 0)), Ok("sm_90a"), "code for exactly this device comes first");
    assert_eq!(chosen((10, 3)), Ok("sm_100f"));
    assert_eq!(chosen((11, 0)), Ok("sm_90"), "neither sm_90a nor sm_100f carries over");
    assert_eq!(chosen((12, 1)), Ok("sm_120"));
    let error = chosen((7, 5)).expect_err("too old a device").to_string();
    assert!(error.contains("7.5") && error.contains("sm_80") && error.contains("sm_120"), "{error}");
}

#[test]
fn an_older_driver_gets_an_older_target() {
    let images = [image("sm_80", "7.0"), image("sm_120", "8.7")];
    let on = |driver| choose(&images, (12, 0), driver).map(|image| image.origin.as_str());
    assert_eq!(on(version(12, 8)), Ok("sm_120"));
    assert_eq!(on(version(12, 7)), Ok("sm_80"));
    let all_new = [image("sm_80", "99.0"), image("sm_90", "99.0")];
    let error = choose(&all_new, (9, 0), version(13, 0)).map(|_| ()).expect_err("all too new");
    assert!(matches!(error, PtxError::DriverTooOld { .. }));
}

#[test]
fn embedded_ptx_suits_the_drivers_that_readme_names() {
    let images = KernelSource::Embedded.images().expect("the program's own PTX");
    assert_eq!(images.is_empty(), host::gpu::ptx::WITHOUT_PTX.is_some());
    for image in &images {
        // sm_120 appeared with CUDA 12.8; everything else should load on any driver of CUDA 12.
        let oldest = if image.header.target.capability >= (12, 0) { version(12, 8) } else { version(12, 0) };
        let verdict = check_version(image.header.version, oldest);
        assert!(verdict.is_ok(), "{}: {}", image.origin, verdict.expect_err("not ok"));
    }
}

#[test]
fn kernels_from_a_folder_are_read_or_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = KernelSource::Folder(folder.path().to_owned());
    assert_eq!(source.images().expect("an empty folder").len(), 0);
    std::fs::write(folder.path().join("a.ptx"), PTX).expect("a file");
    std::fs::write(folder.path().join("notes.txt"), "not PTX").expect("a file");
    assert_eq!(source.images().expect("one file").len(), 1);
    std::fs::write(folder.path().join("b.ptx"), [0xff, 0xfe]).expect("a file");
    let error = source.images().expect_err("not text").to_string();
    assert!(error.contains("b.ptx"), "{error}");
    let error = KernelSource::Folder("no/such/folder".into()).images().expect_err("no folder").to_string();
    assert!(error.contains("no/such/folder"), "{error}");
}

#[test]
fn selectors_parse() {
    let cases = [
        ("", Selector::MostFree),
        ("most-free", Selector::MostFree),
        ("0", Selector::Index(0)),
        ("17", Selector::Index(17)),
        ("sm_90", Selector::Capability(9, 0)),
        ("sm_120", Selector::Capability(12, 0)),
        ("8.9", Selector::Capability(8, 9)),
        ("gpu-0a1B", Selector::Uuid("GPU-0a1b".to_owned())),
    ];
    for (text, selector) in cases {
        assert_eq!(text.parse(), Ok(selector), "{text:?}");
    }
    for text in ["-1", "abc", "sm_", "sm_9x", "9.", "GPU-", "GPU-xyz", "4294967296", "1e3", "é€é"] {
        let error = text.parse::<Selector>().expect_err(text).to_string();
        assert!(error.contains("index") && error.contains("UUID"), "{error}");
    }
    assert_eq!("emulated".parse(), Ok(CheckedDevice::Emulated));
    for text in ["auto", "cuda:0", "cuda:GPU-0a1b", "cuda:9.0"] {
        let device: CheckedDevice = text.parse().expect(text);
        assert_eq!(device.to_string().parse(), Ok(device), "what is shown can be typed");
    }
}

fn info(index: u32, capability: (u32, u32), free_gib: u64) -> DeviceInfo {
    let properties = Properties { name: format!("card {index}"), capability, ..Emulated::new().properties().clone() };
    let memory = MemoryInfo { free_bytes: free_gib << 30, total_bytes: 24 << 30 };
    DeviceInfo { index, uuid: format!("GPU-{index}{index}ab"), properties, memory }
}

#[test]
fn selectors_choose() {
    let devices = [info(0, (8, 9), 8), info(1, (9, 0), 20), info(2, (8, 9), 20), info(3, (8, 9), 1)];
    let chosen = |text: &str| text.parse::<Selector>().expect(text).choose(&devices).map(|device| device.index);
    assert_eq!(chosen("most-free").expect("a device"), 1, "the lower index among equals");
    assert_eq!(chosen("3").expect("a device"), 3);
    assert_eq!(chosen("sm_89").expect("a device"), 2);
    assert_eq!(chosen("GPU-33").expect("a device"), 3);
    let error = chosen("4").expect_err("there are four").to_string();
    assert!(error.contains("number 4") && error.contains("card 3"), "{error}");
    assert!(matches!(Selector::MostFree.choose(&[]), Err(cuda::Error::NoDevice)));
}

#[test]
#[expect(unsafe_code, reason = "reading what a driver would read")]
fn arguments_are_marshalled_one_pointer_each() {
    let mut y = [1.0f32; 2];
    let args: <axpy as Kernel>::Args = (2.5, std::ptr::null(), y.as_mut_ptr(), 7);
    args.with_params(|params: &[*mut c_void]| {
        assert_eq!(params.len(), 4);
        // SAFETY: each pointer is to the argument of that position and type.
        unsafe {
            assert_eq!(params[0].cast::<f32>().read(), 2.5);
            assert!(params[1].cast::<*const f32>().read().is_null());
            assert_eq!(params[2].cast::<*mut f32>().read(), y.as_mut_ptr());
            assert_eq!(params[3].cast::<u32>().read(), 7);
        }
    });
    assert_eq!(<axpy as Kernel>::NAME, "axpy");
}

#[test]
fn the_self_test_passes_in_every_order_and_on_several_threads() {
    use cuda_std::emu::Order;
    std::thread::scope(|scope| {
        for order in [Order::Forward, Order::Backward, Order::Shuffled(7)] {
            scope.spawn(move || {
                let mut steps = 0;
                let result = self_test::run(&Emulated::with_order(order), Scale::EMULATED, &mut |_, _| steps += 1);
                assert!(result.is_ok(), "{order:?}: {}", result.expect_err("not ok"));
                assert_eq!(steps, 8);
            });
        }
    });
}

#[test]
fn one_device_serves_several_threads() {
    let device = Emulated::new();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let device = &device;
            scope.spawn(move || {
                for n in [1, 31, 33, 129] {
                    let x: Vec<f32> = (0..n).map(|i| (i * (t + 1)) as f32).collect();
                    let (dx, dy) = (device.alloc_from(&x).expect("x"), device.alloc_from(&vec![1.0f32; n]).expect("y"));
                    launch_axpy(device, 2.0, dx.slice(), dy.slice()).expect("a launch");
                    let expected: Vec<f32> = x.iter().map(|x| 2.0 * x + 1.0).collect();
                    assert_eq!(device.download_vec(dy.slice()).expect("y"), expected);
                }
            });
        }
    });
    assert_eq!(device.memory().expect("memory").free_bytes, device.memory().expect("memory").total_bytes);
}

/// B31: devices keep apart.
#[test]
fn two_devices_in_turn_keep_apart() {
    let (a, b) = (Emulated::new(), Emulated::new());
    let on_a = a.alloc_from(&[1.0f32; 8]).expect("a");
    let on_b = b.alloc_from(&[2.0f32; 8]).expect("b");
    launch_axpy(&a, 1.0, on_a.slice(), a.alloc_from(&[0.0; 8]).expect("y").slice()).expect("on a");
    launch_axpy(&b, 1.0, on_b.slice(), b.alloc_from(&[0.0; 8]).expect("y").slice()).expect("on b");
    for wrong in [
        a.download_vec(on_b.slice()).map(|_| ()),
        b.upload(on_a.slice(), &[0.0; 8]),
        a.copy(on_a.slice(), on_b.slice()),
        b.fill_bytes(on_a.slice().as_bytes(), 0),
        b.check_owner(on_a.slice()),
    ] {
        assert!(matches!(wrong, Err(DeviceError::WrongDevice { .. })), "{wrong:?}");
    }
    assert_eq!(a.download_vec(on_a.slice()).expect("a"), [1.0; 8]);
}

#[test]
fn slices_are_checked() {
    let device = Emulated::new();
    let buffer: Buffer<_, f32> = device.alloc_zeroed(100).expect("a buffer");
    assert_eq!(buffer.part(10..20).expect("inside").len(), 10);
    assert_eq!(buffer.part(100..).expect("the empty end").len(), 0);
    #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
    let outside = [buffer.part(..101), buffer.part(20..10), buffer.part(..=usize::MAX), buffer.part(101..)];
    for part in outside {
        assert!(matches!(part, Err(DeviceError::Range(_))), "{part:?}");
    }
    let (low, high) = (buffer.part(..50).expect("half"), buffer.part(50..).expect("half"));
    assert!(!low.overlaps(high) && buffer.slice().overlaps(high) && !low.overlaps(buffer.part(7..7).expect("none")));
    assert!(buffer.slice().cast::<[f32; 4]>().is_ok());
    assert!(buffer.part(..5).expect("five").cast::<[f32; 4]>().is_err(), "5 is no multiple of 4");
    assert!(buffer.part(1..3).expect("two").cast::<f64>().is_err(), "aligned to 4 bytes only");
    assert!(buffer.part(1..).expect("odd").check_aligned(16).is_err());
    assert!(device.upload(low, &[0.0; 49]).is_err(), "lengths differ");
    assert!(launch_axpy(&device, 1.0, low, buffer.part(..49).expect("less")).is_err());
}

/// B47: running out of memory is an error and no more.
#[test]
fn an_allocation_that_does_not_fit_leaves_the_device_usable() {
    let device = Emulated::new().memory_limit(1000);
    let first: Buffer<_, u8> = device.alloc(600).expect("it fits");
    let error = device.alloc::<u8>(401).map(|_| ()).expect_err("it does not fit");
    assert!(matches!(error, DeviceError::OutOfMemory { wanted_bytes: 401, free_bytes: 400 }), "{error:?}");
    assert!(error.to_string().contains("out of device memory"), "{error}");
    assert!(matches!(device.alloc::<u64>(usize::MAX / 4), Err(DeviceError::OutOfMemory { .. })), "the size overflows");
    assert!(device.alloc_zeroed::<u8>(400).is_ok());
    drop(first);
    assert!(device.alloc_zeroed::<u8>(1000).is_ok(), "what was freed can be had again");
}

#[test]
fn a_kernel_out_of_bounds_is_an_error_that_names_it() {
    let device = Emulated::new();
    let (x, y) = (device.alloc_from(&[1.0f32; 4]).expect("x"), device.alloc_from(&[1.0f32; 5]).expect("y"));
    #[expect(unsafe_code, reason = "a launch with a wrong length, which the emulator catches")]
    // SAFETY: the emulator checks every access.
    let fault = unsafe { device.launch(axpy, Launch::linear(1, 32), (1.0, x.slice().ptr(), y.slice().ptr_mut(), 5)) };
    let fault = fault.expect_err("x is too short").to_string();
    assert!(fault.contains("axpy") && fault.contains("out of bounds"), "{fault}");
    launch_axpy(&device, 1.0, x.slice(), y.part(..4).expect("four")).expect("the device is still usable");
}

#[test]
fn a_replay_reads_memory_and_not_the_capture() {
    let device = Emulated::new();
    let (x, y) = (device.alloc_from(&[1.0f32; 4]).expect("x"), device.alloc_zeroed::<f32>(4).expect("y"));
    let graph = device.capture(&mut || launch_axpy(&device, 3.0, x.slice(), y.slice())).expect("a graph");
    assert_eq!(device.download_vec(y.slice()).expect("y"), [0.0; 4], "capturing runs nothing");
    for (value, expected) in [(1.0, 3.0), (2.0, 9.0)] {
        device.upload(x.slice(), &[value; 4]).expect("x");
        #[expect(unsafe_code, reason = "a replay")]
        // SAFETY: both buffers are alive.
        unsafe { device.replay(&graph) }.expect("a replay");
        assert_eq!(device.download_vec(y.slice()).expect("y"), [expected; 4]);
    }
    let failed = device.capture(&mut || device.download_vec(y.slice()).map(|_| ()));
    assert!(matches!(failed, Err(DeviceError::Unsupported { .. })));
    assert!(device.download_vec(y.slice()).is_ok(), "a failed capture is over");
}

#[test]
fn staged_uploads_arrive_whole_and_in_place() {
    let device = Emulated::new();
    for (bytes, chunk, n_chunks) in [(0, 16, 2), (1, 16, 1), (16, 16, 1), (17, 16, 2), (1000, 7, 3), (100, 4096, 1)] {
        let from: Vec<u8> = (0..bytes).map(|i| (i * 7 + 3) as u8).collect();
        let to = device.alloc_from(&vec![0xeeu8; bytes + 2]).expect("memory");
        let mut staging = Staging::new(&device, chunk, n_chunks).expect("pinned memory");
        staging.upload(&device, to.part(1..=bytes).expect("the middle"), &from).expect("an upload");
        staging.finish(&device).expect("the end");
        let mut expected = vec![0xee];
        expected.extend(&from);
        expected.push(0xee);
        assert_eq!(device.download_vec(to.slice()).expect("the bytes"), expected, "{bytes} bytes by {chunk}");
        assert!(staging.upload(&device, to.slice(), &from).is_err(), "lengths differ");
    }
}

#[test]
fn a_ring_keeps_its_depth_and_order() {
    let device = Emulated::new();
    let mut ring = Ring::new(2);
    let tickets: Vec<_> = (0..5).map(|_| ring.commit_async(&device).expect("a step")).collect();
    assert!(tickets.is_sorted());
    assert!(ring.is_released(tickets[2]) && !ring.is_released(tickets[3]), "two are in flight");
    ring.wait(&device, tickets[4]).expect("the last step");
    assert!(tickets.iter().all(|&ticket| ring.is_released(ticket)));
    assert_eq!(ring.release_completed(&device).expect("no step"), 0);
}
