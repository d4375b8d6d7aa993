//! The emulated device catches what it promises to catch, and computes what the GPU computes.

mod global;
mod instructions;
mod meeting;
mod norm;
mod shared_memory;

use cuda_std::emu::{Device, Fault, Order, What};

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
        assert_eq!(fault.at.map(|at| at.file().contains("emulator")), blames_a_line.then_some(true), "{fault}");
    }
    let [first, ..] = faults;
    first
}
