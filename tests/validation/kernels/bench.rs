//! The kernel benchmark: that it runs (emulated, tiny), and its table on a GPU; `ZINC_BENCH=FILE` gets it as JSON.

use std::collections::BTreeMap;

use host::gpu::Emulated;
use host::gpu::ops::bench::{Measurement, bench};
use serde::Serialize;

use super::report;

/// A row of the report: speed, and the worst error that the tests of the same operation and type met.
#[derive(Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    speed: &'a Measurement,
    worst_error: Option<f64>,
}

impl<'a> Row<'a> {
    fn new(speed: &'a Measurement, errors: &BTreeMap<String, f64>) -> Self {
        // "sample, top-k 40" is of `sample`, "attention and merge" of `attention`.
        let op = speed.op.split([',', ' ']).next().unwrap_or_default();
        let name = if speed.ty.is_empty() { op.to_owned() } else { format!("{op} {}", speed.ty) };
        Row { speed, worst_error: errors.get(&name).or_else(|| errors.get(op)).copied() }
    }
}

fn print(rows: &[Row<'_>]) {
    println!("{:20} {:5} {:48} {:>12} {:>12} {:>8} {:>12}", "kernel", "", "shape", "time", "", "share", "worst error");
    for Row { speed: m, worst_error } in rows {
        let error = worst_error.map_or("-".to_owned(), |error| format!("{error:.1e}"));
        let tera_ops = m.tera_ops_per_s.map_or(String::new(), |ops| format!("{ops:7.1} TOP/s"));
        println!(
            "{:20} {:5} {:48} {:9.1} us {:7.0} GB/s {:6.1} % {error:>12} {tera_ops}",
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
fn a_measurement_gets_the_error_of_its_operation_and_type() {
    let errors = [("matvec Q4_K", 1.0), ("matvec_q8 Q4_K", 2.0), ("sample", 3.0)];
    let errors = errors.map(|(name, error)| (name.to_owned(), error)).into();
    let error = |op, ty| {
        let speed = Measurement {
            op,
            ty,
            shape: String::new(),
            bytes: 1,
            us: 1.0,
            gb_per_s: 1.0,
            share: 1.0,
            tera_ops_per_s: None,
        };
        Row::new(&speed, &errors).worst_error
    };
    assert_eq!(
        (error("matvec", "Q4_K"), error("matvec_q8", "Q4_K"), error("matvec", "F32")),
        (Some(1.0), Some(2.0), None)
    );
    assert_eq!((error("sample, top-k 40", ""), error("argmax", "")), (Some(3.0), None));
}

#[test]
fn the_kernel_benchmark_on_a_gpu() {
    let Some(file) = std::env::var_os("ZINC_BENCH") else {
        println!("skipped: ZINC_BENCH names no file");
        return;
    };
    if let Some(device) = super::gpu() {
        let results = bench(device, 768 << 20, 15).expect("bench");
        let errors = report::written();
        let rows: Vec<Row<'_>> = results.iter().map(|speed| Row::new(speed, &errors)).collect();
        print(&rows);
        assert!(results.iter().all(|m| m.us > 0.0), "{results:?}");
        std::fs::write(file, serde_json::to_string_pretty(&rows).expect("numbers and text")).expect("ZINC_BENCH");
    }
}
