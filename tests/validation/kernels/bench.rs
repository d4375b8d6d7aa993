//! The kernel benchmark: that it runs (emulated, tiny), and its table on a GPU; `ZINC_BENCH=FILE` gets it as JSON.

use host::gpu::Emulated;
use host::gpu::ops::bench::{Measurement, bench};

fn print(results: &[Measurement]) {
    for m in results {
        let tera_ops = m.tera_ops_per_s.map_or(String::new(), |ops| format!("{ops:7.1} TOP/s"));
        println!(
            "{:20} {:5} {:48} {:9.1} us {:7.0} GB/s {:5.1} % {tera_ops}",
            m.op,
            m.ty,
            m.shape,
            m.us,
            m.gb_per_s,
            m.share * 100.0
        );
    }
}

#[test]
fn the_kernel_benchmark_measures_every_kernel() {
    let results = bench(&Emulated::new(), 64 << 10, 1).expect("bench");
    assert_eq!(results[0].op, "read_sweep");
    assert_eq!(results[0].share, 1.0);
    assert!(results.iter().all(|m| m.us > 0.0 && m.gb_per_s > 0.0 && m.bytes > 0), "{results:?}");
    for op in ["matmul_q8", "matmul_float", "route_groups"] {
        assert!(results.iter().any(|m| m.op == op), "{op}");
    }
    for &ty in gpu_kernels::blocks::GgmlType::ALL {
        let matvec = |m: &&Measurement| m.op.starts_with("matvec") && m.ty == ty.name() && m.shape.ends_with("x 2048");
        let forms = results.iter().filter(matvec).count();
        assert_eq!(forms, if host::gpu::ops::takes_q8(ty) { 2 } else { 1 }, "{ty}");
    }
}

#[test]
fn the_kernel_benchmark_on_a_gpu() {
    let Some(file) = std::env::var_os("ZINC_BENCH") else {
        println!("skipped: ZINC_BENCH names no file");
        return;
    };
    if let Some(device) = super::gpu() {
        let results = bench(device, 768 << 20, 15).expect("bench");
        print(&results);
        assert!(results.iter().all(|m| m.us > 0.0), "{results:?}");
        std::fs::write(file, serde_json::to_string_pretty(&results).expect("numbers and text")).expect("ZINC_BENCH");
    }
}
