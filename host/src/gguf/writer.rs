//! Writing GGUF files: for synthetic models, and for tests that craft and split files.

#![expect(
    clippy::arithmetic_side_effects,
    reason = "sizes of data that is in memory, or declared by the program itself"
)]

use super::GgmlType;
use super::error::ErrorKind;
use super::header::{DEFAULT_ALIGNMENT, MAGIC};
use super::tensor::data_bytes;
use super::value::{Value, ValueType};

/// Collects metadata and tensor declarations; [`Writer::layout`] then says what goes where, so that
/// tensor data can be written in any order, by any number of threads.
#[derive(Debug)]
pub struct Writer {
    alignment: usize,
    n_pairs: u64,
    /// The encoded metadata pairs.
    pairs: Vec<u8>,
    n_tensors: u64,
    /// The encoded tensor table.
    table: Vec<u8>,
    /// Each tensor's first byte, counted from the start of the data section, and its length.
    spans: Vec<(u64, usize)>,
}

/// A file to be: its header, and where each tensor's data goes.
#[derive(Debug)]
pub struct Layout {
    /// The file's first bytes, padding included.
    pub header: Vec<u8>,
    /// Offset in the file and length of each tensor in the order of declaration. Bytes between them
    /// are zero.
    pub spans: Vec<(u64, usize)>,
    /// Length of the file.
    pub n_bytes: u64,
}

impl Default for Writer {
    fn default() -> Writer {
        Writer::new()
    }
}

impl Writer {
    /// A file without metadata and tensors.
    pub fn new() -> Writer {
        Writer {
            alignment: DEFAULT_ALIGNMENT,
            n_pairs: 0,
            pairs: Vec::new(),
            n_tensors: 0,
            table: Vec::new(),
            spans: Vec::new(),
        }
    }

    /// A file whose tensors start at multiples of `alignment`, which `general.alignment` says.
    pub fn with_alignment(alignment: u32) -> Writer {
        let mut writer = Writer { alignment: alignment as usize, ..Writer::new() };
        writer.put("general.alignment", Value::U32(alignment));
        writer
    }

    /// Adds a pair; the value may come from another file.
    pub fn put(&mut self, key: &str, value: Value<'_>) {
        self.start_pair(key, value.ty());
        encode(&mut self.pairs, value);
    }

    /// Adds a string.
    pub fn put_str(&mut self, key: &str, value: &str) {
        self.put(key, Value::String(value.as_bytes()));
    }

    /// Adds an array of strings.
    pub fn put_strings<S: AsRef<[u8]>>(&mut self, key: &str, strings: &[S]) {
        self.start_array(key, ValueType::String, strings.len());
        for string in strings {
            put_bytes(&mut self.pairs, string.as_ref());
        }
    }

    /// Adds an array of i32.
    pub fn put_i32s(&mut self, key: &str, values: &[i32]) {
        self.start_array(key, ValueType::I32, values.len());
        values.iter().for_each(|value| self.pairs.extend(value.to_le_bytes()));
    }

    /// Adds an array of f32.
    pub fn put_f32s(&mut self, key: &str, values: &[f32]) {
        self.start_array(key, ValueType::F32, values.len());
        values.iter().for_each(|value| self.pairs.extend(value.to_le_bytes()));
    }

    /// Adds an array of booleans.
    pub fn put_bools(&mut self, key: &str, values: &[bool]) {
        self.start_array(key, ValueType::Bool, values.len());
        self.pairs.extend(values.iter().map(|&value| u8::from(value)));
    }

    fn start_pair(&mut self, key: &str, ty: ValueType) {
        self.n_pairs += 1;
        put_bytes(&mut self.pairs, key.as_bytes());
        self.pairs.extend((ty as u32).to_le_bytes());
    }

    fn start_array(&mut self, key: &str, ty: ValueType, len: usize) {
        self.start_pair(key, ValueType::Array);
        self.pairs.extend((ty as u32).to_le_bytes());
        self.pairs.extend((len as u64).to_le_bytes());
    }

    /// Declares the next tensor; dimensions are innermost first. Returns its size in bytes.
    ///
    /// # Errors
    /// If the dimensions are no tensor of this type.
    pub fn tensor(&mut self, name: &str, ty: GgmlType, dims: &[usize]) -> Result<usize, ErrorKind> {
        let tensor = || name.to_owned();
        let n_dims = u32::try_from(dims.len()).unwrap_or(u32::MAX);
        if !(1..=4).contains(&n_dims) {
            return Err(ErrorKind::DimCount { tensor: tensor(), n_dims });
        }
        let mut padded = [1u64; 4];
        dims.iter().zip(&mut padded).for_each(|(&dim, out)| *out = dim as u64);
        let n_bytes = data_bytes(ty, padded).map_err(|problem| problem.about(tensor(), ty, &padded[..dims.len()]))?;

        let end = self.spans.last().map_or(0, |&(offset, len)| offset + len as u64);
        let offset = end.next_multiple_of(self.alignment as u64);
        self.n_tensors += 1;
        put_bytes(&mut self.table, name.as_bytes());
        self.table.extend(n_dims.to_le_bytes());
        dims.iter().for_each(|&dim| self.table.extend((dim as u64).to_le_bytes()));
        self.table.extend((ty as u32).to_le_bytes());
        self.table.extend(offset.to_le_bytes());
        self.spans.push((offset, n_bytes));
        Ok(n_bytes)
    }

    /// The header as version 3, and the tensors' places.
    pub fn layout(&self) -> Layout {
        let mut header = MAGIC.to_vec();
        header.extend(3u32.to_le_bytes());
        header.extend(self.n_tensors.to_le_bytes());
        header.extend(self.n_pairs.to_le_bytes());
        header.extend(&self.pairs);
        header.extend(&self.table);
        header.resize(header.len().next_multiple_of(self.alignment), 0);
        let start = header.len() as u64;
        let spans: Vec<(u64, usize)> = self.spans.iter().map(|&(offset, len)| (start + offset, len)).collect();
        let end = spans.last().map_or(start, |&(offset, len)| offset + len as u64);
        Layout { header, spans, n_bytes: end.next_multiple_of(self.alignment as u64) }
    }

    /// The whole file, for small ones. `data` gives each tensor's bytes in the order of declaration.
    ///
    /// # Panics
    /// If the data of a tensor is missing or of the wrong length.
    pub fn to_bytes<'a>(&self, data: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
        let layout = self.layout();
        let mut file = layout.header;
        let mut data = data.into_iter();
        for (offset, len) in layout.spans {
            let bytes = data.next().expect("each declared tensor has data");
            assert_eq!(bytes.len(), len, "a tensor's data has the declared size");
            file.resize(offset as usize, 0);
            file.extend(bytes);
        }
        file.resize(layout.n_bytes as usize, 0);
        file
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn encode(out: &mut Vec<u8>, value: Value<'_>) {
    match value {
        Value::U8(v) => out.push(v),
        Value::I8(v) => out.push(v.cast_unsigned()),
        Value::Bool(v) => out.push(v.into()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::String(bytes) => put_bytes(out, bytes),
        Value::Array(array) => {
            out.extend((array.ty() as u32).to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            out.extend(array.encoded());
        }
    }
}
