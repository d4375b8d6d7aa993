//! Where the time of a decode step or a prompt goes: by stage of the model, and by kernel.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::backend::{Launched, Measured, Section};

/// What the stages are called, in the order of a step.
const STAGES: [&str; 9] =
    ["embedding", "norm", "projections", "attention", "delta net", "ffn", "router", "experts", "head"];

/// Where the time of one step went. Kernels are timed one by one, without overlap.
#[derive(Serialize)]
pub(super) struct Profile {
    pub(super) name: String,
    /// One step, not profiled: the median of the test.
    pub(super) step_us: f64,
    /// Its kernels together.
    pub(super) kernels_us: f64,
    /// The step's time that no kernel accounts for. Negative where kernels overlap more than there is between them.
    pub(super) idle_us: f64,
    /// How fast the device reads memory.
    pub(super) read_gb_per_s: Option<f64>,
    pub(super) stages: Vec<Part>,
    pub(super) kernels: Vec<Part>,
    /// The launches of one step, in order.
    pub(super) launches: Vec<Launch>,
}

/// The share that a stage or a kernel has in a step.
#[derive(Serialize)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) launches: f64,
    pub(super) us: f64,
    pub(super) moved_bytes: f64,
    pub(super) gb_per_s: f64,
    /// Of `read_gb_per_s`.
    pub(super) share_of_bandwidth: Option<f64>,
}

/// One launch of a step; its time is the mean over the profiled steps.
#[derive(Serialize)]
pub(super) struct Launch {
    pub(super) stage: &'static str,
    pub(super) kernel: &'static str,
    pub(super) us: f64,
}

impl Profile {
    /// Of `n_steps` equal steps; `step_us` is what one takes when it is not profiled.
    pub(super) fn new(name: String, measured: &Measured, n_steps: u32, step_us: f64) -> Self {
        let stages = stages(&measured.launches);
        let steps = f64::from(n_steps);
        let bandwidth = measured.read_gb_per_s;
        let parts = |names: &mut dyn Iterator<Item = &str>| {
            let mut parts: BTreeMap<String, [f64; 3]> = BTreeMap::new();
            for (name, launch) in names.zip(&measured.launches) {
                let sums = parts.entry(name.to_owned()).or_default();
                for (sum, x) in sums.iter_mut().zip([1.0, launch.us, launch.moved_bytes as f64]) {
                    *sum += x / steps;
                }
            }
            let part = |(name, [launches, us, moved_bytes]): (String, [f64; 3])| {
                let gb_per_s = moved_bytes / us.max(f64::MIN_POSITIVE) / 1e3;
                let share_of_bandwidth = bandwidth.map(|bandwidth| gb_per_s / bandwidth);
                Part { name, launches, us, moved_bytes, gb_per_s, share_of_bandwidth }
            };
            parts.into_iter().map(part).collect::<Vec<_>>()
        };
        let mut kernels = parts(&mut measured.launches.iter().map(|launch| launch.kernel));
        kernels.sort_by(|a, b| b.us.total_cmp(&a.us));
        let mut by_stage = parts(&mut stages.iter().copied());
        by_stage.sort_by_key(|part| STAGES.iter().position(|stage| *stage == part.name));
        let kernels_us = kernels.iter().map(|part| part.us).sum();
        let launches = one_step(&measured.launches, &stages);
        let read_gb_per_s = bandwidth;
        let idle_us = step_us - kernels_us;
        Profile { name, step_us, kernels_us, idle_us, read_gb_per_s, stages: by_stage, kernels, launches }
    }
}

/// The stage of every launch.
fn stages(launches: &[Launched]) -> Vec<&'static str> {
    // In a mixture of experts, what comes before the choice is the router. `gate_up` chooses and goes on.
    let mut routed = false;
    let stage = |launch: &Launched| {
        let kernel = launch.kernel;
        let is = |prefixes: &[&str]| prefixes.iter().any(|prefix| kernel.starts_with(prefix));
        let chooses = kernel.contains("topk");
        routed = launch.section == Section::Moe && (routed || chooses || is(&["gate_up"]));
        match launch.section {
            Section::Embedding => "embedding",
            _ if is(&["rms_norm"]) => "norm",
            Section::Attention if is(&["attention", "rope", "kv_", "split_gate", "sigmoid_mul"]) => "attention",
            Section::DeltaNet if is(&["ssm_"]) => "delta net",
            Section::Attention | Section::DeltaNet => "projections",
            Section::Ffn => "ffn",
            Section::Moe if routed && !chooses => "experts",
            Section::Moe => "router",
            Section::Head => "head",
        }
    };
    launches.iter().map(stage).collect()
}

/// The launches of a step, in order, as the last step has them. The first may have fewer, for no step before it chose its
/// tokens; the times are means over the steps that are alike.
fn one_step(launches: &[Launched], stages: &[&'static str]) -> Vec<Launch> {
    let starts = |i: &usize| {
        let embeds = |i: usize| launches[i].section == Section::Embedding;
        embeds(*i) && (*i == 0 || !embeds(*i - 1))
    };
    let mut bounds: Vec<usize> = (0..launches.len()).filter(starts).collect();
    bounds.push(launches.len());
    let Some(last) = bounds.windows(2).next_back().map(|step| step[0]..step[1]) else { return Vec::new() };
    let alike = |step: &&[Launched]| step.iter().map(|l| l.kernel).eq(launches[last.clone()].iter().map(|l| l.kernel));
    let steps: Vec<&[Launched]> = bounds.windows(2).map(|step| &launches[step[0]..step[1]]).filter(alike).collect();
    let mean = |i: usize| steps.iter().map(|step| step[i].us).sum::<f64>() / steps.len() as f64;
    let launch = |(i, at): (usize, usize)| Launch { stage: stages[at], kernel: launches[at].kernel, us: mean(i) };
    last.clone().enumerate().map(launch).collect()
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { name, step_us, kernels_us, idle_us, .. } = self;
        writeln!(f, "{name}: {step_us:.1} us a step; kernels one by one {kernels_us:.1} us, the rest {idle_us:.1} us")?;
        match self.read_gb_per_s {
            Some(bandwidth) => writeln!(f, "this device reads {bandwidth:.0} GB/s")?,
            None => writeln!(f, "no room to measure how fast this device reads")?,
        }
        for (what, parts) in [("stage", &self.stages), ("kernel", &self.kernels)] {
            writeln!(f, "\n| {what} | launches | us | us each | of the time | MiB | GB/s | of the bandwidth |")?;
            writeln!(f, "|---|---:|---:|---:|---:|---:|---:|---:|")?;
            for part in parts {
                let &Part { ref name, launches, us, moved_bytes, gb_per_s, share_of_bandwidth } = part;
                let (each, share) = (us / launches, us / kernels_us * 100.0);
                let mib = moved_bytes / f64::from(1 << 20);
                write!(
                    f,
                    "| {name} | {launches:.1} | {us:.1} | {each:.2} | {share:.1} % | {mib:.2} | {gb_per_s:.0} |"
                )?;
                match share_of_bandwidth {
                    Some(share) => writeln!(f, " {:.1} % |", share * 100.0)?,
                    None => writeln!(f, " – |")?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_follow_section_kernel_and_the_choice_of_experts() {
        use Section::{Attention, DeltaNet, Embedding, Head, Moe};
        let step = [
            (Embedding, "embedding_q8_0", "embedding"),
            (Attention, "rms_norm", "norm"),
            (Attention, "matvec_q8_q4_k", "projections"),
            (Attention, "attention_f16", "attention"),
            (DeltaNet, "ssm_delta_net_64", "delta net"),
            (DeltaNet, "matvec_q8_q4_k", "projections"),
            (Moe, "matvec_f32", "router"),
            (Moe, "softmax_topk", "router"),
            (Moe, "matvec_q8_q4_k", "experts"),
            (Moe, "matvec_f32", "experts"),
            (Head, "rms_norm", "norm"),
            (Head, "matvec_q8_q6_k", "head"),
        ];
        let launch =
            |(section, kernel, _): (Section, &'static str, _)| Launched { section, kernel, us: 2.0, moved_bytes: 4000 };
        let launches: Vec<Launched> = step.iter().chain(&step).copied().map(launch).collect();
        let measured = Measured { launches, read_gb_per_s: Some(4.0) };
        let profile = Profile::new("two steps".to_owned(), &measured, 2, 30.0);
        let found: Vec<&str> = profile.launches.iter().map(|launch| launch.stage).collect();
        assert_eq!(found, step.map(|(_, _, stage)| stage));
        assert_eq!((profile.kernels_us, profile.idle_us), (24.0, 6.0));
        let experts = profile.stages.iter().find(|part| part.name == "experts").expect("a stage");
        assert_eq!(
            (experts.launches, experts.us, experts.gb_per_s, experts.share_of_bandwidth),
            (2.0, 4.0, 2.0, Some(0.5))
        );
        let order: Vec<&str> = profile.stages.iter().map(|part| &*part.name).collect();
        assert!(order.is_sorted_by_key(|name| STAGES.iter().position(|stage| stage == name)), "{order:?}");
        assert!(profile.to_string().contains("| experts | 2.0 | 4.0 | 2.00 | 16.7 % |"), "{profile}");
    }
}
