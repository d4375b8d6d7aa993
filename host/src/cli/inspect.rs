//! `host inspect`: what is in a GGUF file, and what it will take to run it.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use gpu_kernels::blocks::GgmlType;

use super::error::CliError;
use super::model_path::by_name;
use crate::cpu::dequant::dequantize_row;
use crate::gguf::{Array, Gguf, Tensor, Value};
use crate::model::config::Config;

/// Array elements and string characters that are shown before the rest is left out.
const MAX_ELEMENTS: usize = 8;
const MAX_CHARS: usize = 96;

/// Show a GGUF file's metadata, tensors, and memory needs.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The file, or any shard of a split model.
    file: PathBuf,
    /// Show this tensor's first values instead.
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
    /// How many of its values.
    #[arg(long, value_name = "N", default_value_t = 16, requires = "tensor")]
    head: usize,
}

/// Prints what `args` asks for.
///
/// # Errors
/// If the file cannot be opened, or has no such tensor.
pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    let gguf = Gguf::open(&by_name(&args.file)?)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let written = match &args.tensor {
        Some(name) => inspect_tensor(gguf.tensor(name)?, args.head, &mut out),
        None => inspect(&gguf, &mut out),
    };
    written.and_then(|()| out.flush()).map_err(|source| CliError::Stream { stream: "stdout", source })
}

/// Writes metadata, tensor table, totals for each type, and a plan of memory.
///
/// # Errors
/// If writing to `out` fails.
pub fn inspect(gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    write_files(gguf, out)?;
    writeln!(out, "\nmetadata")?;
    for (key, value) in gguf.metadata() {
        writeln!(out, "  {} = {}", key.escape_debug(), show(value))?;
    }
    write_tensors(gguf, out)?;
    write_totals(gguf, out)?;
    writeln!(out, "\nmemory")?;
    match Config::from_gguf(gguf) {
        Ok(config) => write_plan(&config, gguf, out),
        Err(e) => writeln!(out, "  not a model that zinc can run: {e}"),
    }
}

fn write_files(gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    let files: Vec<usize> = gguf.shard_bytes().collect();
    let bytes: usize = files.iter().sum();
    write!(out, "{}", gguf.path().display())?;
    if files.len() > 1 {
        write!(out, " and {} more", files.len() - 1)?;
    }
    writeln!(out, ": {}, {} keys, {} tensors", size(bytes), gguf.metadata().len(), gguf.tensors().len())
}

fn write_tensors(gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    let width = gguf.tensors().map(|t| t.name.escape_debug().count()).max().unwrap_or(0).min(60);
    writeln!(out, "\ntensors (dimensions: innermost first)")?;
    for tensor in gguf.tensors() {
        let name = tensor.name.escape_debug().to_string();
        let dims: Vec<String> = tensor.dims().iter().map(usize::to_string).collect();
        let dims = format!("[{}]", dims.join(", "));
        writeln!(out, "  {name:width$}  {:5}  {dims:22}  {:>12}", tensor.ty.name(), tensor.n_bytes)?;
    }
    Ok(())
}

fn write_totals(gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    // Keyed by ggml's number, for its order.
    let mut totals: BTreeMap<u32, (GgmlType, usize, u128, u128)> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let total = totals.entry(tensor.ty as u32).or_insert((tensor.ty, 0, 0, 0));
        total.1 += 1;
        total.2 += tensor.n_elems() as u128;
        total.3 += tensor.n_bytes as u128;
    }
    writeln!(out, "\ntypes")?;
    for (ty, count, n_elems, n_bytes) in totals.into_values() {
        writeln!(out, "  {:5}  {count:5} tensors  {n_elems:>14} elements  {n_bytes:>14} bytes", ty.name())?;
    }
    Ok(())
}

fn write_plan(config: &Config, gguf: &Gguf, out: &mut impl Write) -> io::Result<()> {
    let weights: usize = gguf.tensors().map(|tensor| tensor.n_bytes).sum();
    let kv = config.kv_elems_per_token() * 1000;
    let state = config.state_elems_per_sequence();
    writeln!(out, "  weights                   {}", size(weights))?;
    writeln!(out, "  KV cache, 1000 tokens     {} as F16, {} as F32", size(2 * kv), size(4 * kv))?;
    writeln!(out, "  state, each sequence      {} as F32", size(4 * state))?;
    writeln!(out, "  trained context           {} tokens", config.n_ctx_train)
}

/// Writes the first `n` values of a tensor, eight to a line, each line with the index of its first.
///
/// # Errors
/// If writing to `out` fails.
pub fn inspect_tensor(tensor: Tensor<'_>, n: usize, out: &mut impl Write) -> io::Result<()> {
    let info = tensor.info;
    writeln!(out, "{} {} {:?}", info.name.escape_debug(), info.ty, info.dims())?;
    let mut left = n.min(info.n_elems());
    // Rows are whole blocks and follow each other, so the tensor is one sequence of blocks; 256 elements
    // are whole blocks of every type.
    let mut values = [0.0; 256];
    let (elems, bytes) = (info.ty.block_elems(), info.ty.block_bytes());
    for (part, data) in tensor.data().chunks(values.len() / elems * bytes).enumerate() {
        let values = &mut values[..data.len() / bytes * elems];
        dequantize_row(info.ty, data, values);
        let shown = left.min(values.len());
        for (i, line) in values[..shown].chunks(8).enumerate() {
            write!(out, "{:>10}:", part * 256 + 8 * i)?;
            line.iter().try_for_each(|value| write!(out, " {value:>13.6e}"))?;
            writeln!(out)?;
        }
        left -= shown;
        if left == 0 {
            break;
        }
    }
    Ok(())
}

/// A value on one line. Control characters of a hostile file do not reach the terminal.
fn show(value: Value<'_>) -> String {
    match value {
        Value::Bool(v) => v.to_string(),
        Value::F32(v) => v.to_string(),
        Value::F64(v) => v.to_string(),
        Value::String(bytes) => show_string(bytes),
        Value::Array(array) => show_array(&array),
        int => int.int().map_or_else(String::new, |v| v.to_string()),
    }
}

fn show_string(bytes: &[u8]) -> String {
    // A character is at most four bytes: no need to decode all of a long template.
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MAX_CHARS)]);
    let shown: String = text.chars().take(MAX_CHARS).collect();
    if shown.len() < bytes.len() { format!("{shown:?}… ({} bytes)", bytes.len()) } else { format!("{shown:?}") }
}

fn show_array(array: &Array<'_>) -> String {
    let shown: Vec<String> = array.iter().take(MAX_ELEMENTS).map(show).collect();
    let rest = if array.len() > MAX_ELEMENTS { ", …" } else { "" };
    format!("[{}{rest}] ({} of {})", shown.join(", "), array.len(), array.ty().name())
}

/// A number of bytes, to read.
pub(super) fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.2} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}
