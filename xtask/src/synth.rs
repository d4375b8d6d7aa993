//! `xtask synth`: random-weight GGUF models with the exact tensor layout of a supported network.
//!
//! The weights are random blocks of the right types, with scales that keep activations finite, so that
//! speed, memory, and agreement between engines can be measured without a download. The text that such
//! a model makes means nothing.
//!
//! The file is written by all cores at once: each piece of a few MiB is seeded by its place in the file,
//! so a seed gives the same bytes on any machine, and memory use does not grow with the model.

mod dims;
mod layout;
mod pool;
mod random;
mod vocab;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use host::gguf::{Gguf, Layout, Writer};
use host::model::config::Arch;
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;

use dims::Dims;
use layout::{Fill, TensorPlan};
use pool::Pools;
use random::Rng;

/// What one task writes at a time; a multiple of no block size, so it is rounded down to whole blocks.
const PIECE_BYTES: usize = 8 << 20;

/// Write a random-weight model.
#[derive(Debug, clap::Args)]
pub(crate) struct SynthArgs {
    /// The file to write.
    out: PathBuf,
    /// Network: qwen35moe, gpt-oss, qwen3moe, qwen3, qwen2 or llama.
    #[arg(long, default_value = "qwen35moe", value_parser = parse_arch)]
    arch: Arch,
    /// tiny: a few MB, for tests; mid: hundreds of MB; full: the published model's size.
    #[arg(long, value_enum, default_value_t = Size::Tiny)]
    size: Size,
    /// Seed of the weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Add the multi-token-prediction block of qwen35moe.
    #[arg(long)]
    mtp: bool,
    /// Take the tokenizer from this GGUF file, cut or padded to the model's vocabulary.
    #[arg(long)]
    vocab: Option<PathBuf>,
}

/// A model's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Size {
    Tiny,
    Mid,
    Full,
}

fn parse_arch(name: &str) -> Result<Arch, String> {
    Arch::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = Arch::ALL.iter().map(|arch| arch.name()).collect();
        format!("one of {}", names.join(", "))
    })
}

/// Writes the model that `args` asks for.
pub(crate) fn run(args: &SynthArgs) -> Result<()> {
    let dims = Dims::of(args.arch, args.size);
    if args.mtp && args.arch != Arch::Qwen35Moe {
        anyhow::bail!("--mtp: only qwen35moe has a multi-token-prediction block");
    }
    let mut writer = Writer::new();
    dims::put_metadata(&mut writer, args.arch, args.size, &dims, args.mtp);
    match &args.vocab {
        Some(path) => vocab::copy(&mut writer, &Gguf::open(path)?, dims.n_vocab)?,
        None => writer.put_str("tokenizer.ggml.model", "none"),
    }
    let plans = layout::tensors(args.arch, &dims, args.mtp);
    for plan in &plans {
        writer.tensor(&plan.name, plan.ty, &plan.dims)?;
    }
    let layout = writer.layout();

    let file = File::create(&args.out).with_context(|| args.out.display().to_string())?;
    write(&file, &layout, &plans, args.seed).with_context(|| args.out.display().to_string())?;
    let gib = layout.n_bytes as f64 / (1u64 << 30) as f64;
    println!("{}: {} tensors, {gib:.2} GiB", args.out.display(), plans.len());
    Ok(())
}

/// A run of whole blocks of one tensor.
struct Piece {
    tensor: usize,
    /// Offset in the file.
    offset: u64,
    n_bytes: usize,
}

fn pieces(layout: &Layout, plans: &[TensorPlan]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (tensor, (&(offset, len), plan)) in layout.spans.iter().zip(plans).enumerate() {
        let block = plan.ty.block_bytes();
        let step = PIECE_BYTES / block * block;
        for start in (0..len).step_by(step) {
            let n_bytes = step.min(len - start);
            pieces.push(Piece { tensor, offset: offset + start as u64, n_bytes });
        }
    }
    pieces
}

fn write(file: &File, layout: &Layout, plans: &[TensorPlan], seed: u64) -> Result<()> {
    file.set_len(layout.n_bytes)?;
    file.write_all_at(&layout.header, 0)?;
    let pools = Pools::new(plans, seed);
    let bar = ProgressBar::new(layout.n_bytes).with_style(
        ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec}").expect("the template is valid"),
    );
    pieces(layout, plans).par_iter().try_for_each_init(Vec::new, |buffer, piece| {
        let plan = &plans[piece.tensor];
        let mut rng = Rng::new(seed ^ piece.offset.rotate_left(32));
        buffer.resize(piece.n_bytes, 0);
        match plan.fill {
            Fill::Blocks { std } => pools.fill(plan.ty, std, &mut rng, buffer),
            Fill::AroundOne => fill_f32(buffer, || 1.0 + 0.1 * rng.normal()),
            Fill::Decay => fill_f32(buffer, || -rng.uniform(0.05, 4.0)),
        }
        bar.inc(piece.n_bytes as u64);
        file.write_all_at(buffer, piece.offset)
    })?;
    bar.finish_and_clear();
    Ok(())
}

fn fill_f32(out: &mut [u8], mut value: impl FnMut() -> f32) {
    for word in out.chunks_exact_mut(4) {
        word.copy_from_slice(&value().to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use host::gguf::GgmlType;
    use host::model::config::Config;

    use super::*;

    fn synth(arch: Arch, seed: u64, mtp: bool, vocab: Option<PathBuf>) -> (tempfile::TempDir, Gguf) {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m.gguf");
        let args = SynthArgs { out, arch, size: Size::Tiny, seed, mtp, vocab };
        run(&args).unwrap();
        let gguf = Gguf::open(&args.out).unwrap();
        (dir, gguf)
    }

    fn repo(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
    }

    fn table(gguf: &Gguf) -> BTreeMap<&str, (GgmlType, &[usize])> {
        gguf.tensors().map(|t| (t.name.as_str(), (t.ty, t.dims()))).collect()
    }

    /// The golden models were written by another tool, and run in llama.cpp.
    #[test]
    fn tiny_models_have_the_golden_models_layout() {
        for &arch in Arch::ALL {
            let golden = repo(&format!("tests/data/logits/{}-tiny.gguf", arch.name()));
            let golden = Gguf::open(&golden).unwrap();
            let (_dir, ours) = synth(arch, 1, false, None);
            assert_eq!(table(&ours), table(&golden), "{}", arch.name());
            let config = |gguf| Config::from_gguf(gguf).unwrap();
            assert_eq!(config(&ours), config(&golden));
        }
    }

    #[test]
    fn every_size_has_a_consistent_config() {
        for &arch in Arch::ALL {
            for size in [Size::Tiny, Size::Mid, Size::Full] {
                let dims = Dims::of(arch, size);
                let plans = layout::tensors(arch, &dims, false);
                let mut writer = Writer::new();
                dims::put_metadata(&mut writer, arch, size, &dims, false);
                for plan in &plans {
                    writer.tensor(&plan.name, plan.ty, &plan.dims).unwrap();
                }
                // A sparse file of the full size: only the header takes room on the disk.
                let file = tempfile::NamedTempFile::new().unwrap();
                let layout = writer.layout();
                file.as_file().set_len(layout.n_bytes).unwrap();
                file.as_file().write_all_at(&layout.header, 0).unwrap();
                let config = Config::from_gguf(&Gguf::open(file.path()).unwrap()).unwrap();
                assert_eq!(config.n_layer, dims.n_layer);
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_bytes_and_another_seed_others() {
        let (_dir, first) = synth(Arch::GptOss, 7, false, None);
        let (_dir, again) = synth(Arch::GptOss, 7, false, None);
        let (_dir, other) = synth(Arch::GptOss, 8, false, None);
        let mut differing = 0;
        for info in first.tensors() {
            let data = |gguf: &Gguf| gguf.tensor(&info.name).unwrap().data().to_vec();
            assert_eq!(data(&first), data(&again), "{}", info.name);
            differing += usize::from(data(&first) != data(&other));
        }
        assert_eq!(differing, first.tensors().len());
    }

    #[test]
    fn mtp_adds_one_block_with_full_attention() {
        let (_dir, gguf) = synth(Arch::Qwen35Moe, 1, true, None);
        let config = Config::from_gguf(&gguf).unwrap();
        assert_eq!((config.n_layer, config.n_nextn), (4, 1));
        let proj = gguf.tensor("blk.4.nextn.eh_proj.weight").unwrap();
        assert_eq!(proj.info.dims(), [2 * config.n_embd, config.n_embd]);
        assert!(gguf.find("blk.4.attn_q.weight").is_some());
    }

    #[test]
    fn a_vocabulary_is_cut_to_the_model() {
        let vocab = repo("models/zinc-tiny-qwen35moe.gguf");
        let (_dir, gguf) = synth(Arch::Qwen3, 1, false, Some(vocab));
        let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap();
        assert_eq!(tokens.len(), 512);
        let merges = gguf.strings("tokenizer.ggml.merges").unwrap();
        assert!(!merges.is_empty());
        for merge in merges {
            assert!(tokens.contains(&&*merge.replace(' ', "")), "{merge:?}");
        }
        // The file's own end of text is token 4093.
        assert!(gguf.get("tokenizer.ggml.eos_token_id").is_none());
    }
}
