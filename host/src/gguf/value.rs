//! Metadata values: typed views into the file's bytes.

use std::ops::Range;

use super::cursor::Cursor;
use super::error::ErrorKind;

/// Deepest allowed array inside an array. Real files hold flat arrays only.
const MAX_ARRAY_DEPTH: u32 = 4;

macro_rules! value_types {
    ($($name:ident = $id:literal, $bytes:literal, $text:literal;)+) => {
        /// The types of metadata values, with GGUF's numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        #[allow(missing_docs, reason = "the names are GGUF's")]
        pub enum ValueType { $($name = $id),+ }

        impl ValueType {
            /// The type with GGUF's number `id`.
            pub const fn from_id(id: u32) -> Option<ValueType> {
                match id { $($id => Some(ValueType::$name),)+ _ => None }
            }

            /// The type's name, as the specification spells it.
            pub const fn name(self) -> &'static str {
                match self { $(ValueType::$name => $text),+ }
            }

            /// Fewest bytes that a value of the type takes in a file: its size, or for a string its
            /// length word, or for an array its element type and count.
            const fn min_bytes(self) -> u64 {
                match self { $(ValueType::$name => $bytes),+ }
            }
        }
    };
}

value_types! {
    U8 = 0, 1, "u8";
    I8 = 1, 1, "i8";
    U16 = 2, 2, "u16";
    I16 = 3, 2, "i16";
    U32 = 4, 4, "u32";
    I32 = 5, 4, "i32";
    F32 = 6, 4, "f32";
    Bool = 7, 1, "bool";
    String = 8, 8, "string";
    Array = 9, 12, "array";
    U64 = 10, 8, "u64";
    I64 = 11, 8, "i64";
    F64 = 12, 8, "f64";
}

impl ValueType {
    const fn is_fixed_size(self) -> bool {
        !matches!(self, ValueType::String | ValueType::Array)
    }

    fn read(cursor: &mut Cursor<'_>, what: &'static str) -> Result<ValueType, ErrorKind> {
        let offset = cursor.pos() as u64;
        let id = cursor.u32(what)?;
        ValueType::from_id(id).ok_or(ErrorKind::ValueType { place: cursor.place.clone(), offset, id })
    }
}

/// A metadata value. Strings and arrays borrow the file's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the variants are GGUF's types")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// GGUF says UTF-8; files in the wild do not always keep to it, so the bytes are kept as they are.
    String(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The value of any of the integer types.
    pub fn int(self) -> Option<i128> {
        Some(match self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value of either float type.
    pub fn float(self) -> Option<f64> {
        match self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The type, in words: `u32`, `array of string`.
    pub fn describe(self) -> String {
        match self {
            Value::Array(array) => format!("array of {}", array.ty.name()),
            other => other.ty().name().to_owned(),
        }
    }

    /// The value's type.
    pub fn ty(self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// Reads a type and a value of it, and checks everything inside an array.
    pub(super) fn read(cursor: &mut Cursor<'a>) -> Result<Value<'a>, ErrorKind> {
        let ty = ValueType::read(cursor, "value type")?;
        Value::read_as(ty, cursor, 0)
    }

    fn read_as(ty: ValueType, cursor: &mut Cursor<'a>, depth: u32) -> Result<Value<'a>, ErrorKind> {
        match ty {
            ValueType::String => {
                let len = cursor.u64("string length")?;
                Ok(Value::String(cursor.take("string", len)?))
            }
            ValueType::Array => Ok(Value::Array(Array::read(cursor, depth)?)),
            _ => {
                let offset = cursor.pos() as u64;
                let bytes = cursor.take("value", ty.min_bytes())?;
                if ty == ValueType::Bool && bytes[0] > 1 {
                    let place = cursor.place.clone();
                    return Err(ErrorKind::Bool { place, offset, byte: bytes[0] });
                }
                Ok(Value::fixed(ty, bytes))
            }
        }
    }

    /// Decodes a value of a fixed-size type from exactly its bytes.
    fn fixed(ty: ValueType, bytes: &[u8]) -> Value<'a> {
        const SIZE: &str = "the slice has the type's size";
        match ty {
            ValueType::U8 => Value::U8(bytes[0]),
            ValueType::I8 => Value::I8(bytes[0].cast_signed()),
            ValueType::Bool => Value::Bool(bytes[0] != 0),
            ValueType::U16 => Value::U16(u16::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::I16 => Value::I16(i16::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::U32 => Value::U32(u32::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::I32 => Value::I32(i32::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::F32 => Value::F32(f32::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::U64 => Value::U64(u64::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::I64 => Value::I64(i64::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::F64 => Value::F64(f64::from_le_bytes(bytes.try_into().expect(SIZE))),
            ValueType::String | ValueType::Array => unreachable!("not a fixed-size type"),
        }
    }
}

/// Where a checked value lies in its file: [`Value`] without the borrow.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    ty: ValueType,
    /// Element type and count of an array.
    array: Option<(ValueType, usize)>,
    /// The value's bytes; of a string the text, of an array the elements.
    at: Range<usize>,
}

impl Stored {
    /// Reads and checks the value at the cursor.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Stored, ErrorKind> {
        let value = Value::read(cursor)?;
        let (n_bytes, array) = match value {
            Value::String(text) => (text.len(), None),
            Value::Array(array) => (array.bytes.len(), Some((array.ty, array.len))),
            fixed => (fixed.ty().min_bytes() as usize, None),
        };
        let end = cursor.pos();
        Ok(Stored { ty: value.ty(), array, at: end.saturating_sub(n_bytes)..end })
    }

    /// The value, given the same file's bytes.
    pub(super) fn view<'a>(&self, file: &'a [u8]) -> Value<'a> {
        let bytes = &file[self.at.clone()];
        match self.array {
            Some((ty, len)) => Value::Array(Array { ty, len, bytes }),
            None if self.ty == ValueType::String => Value::String(bytes),
            None => Value::fixed(self.ty, bytes),
        }
    }
}

/// An array as it lies in the file: nothing is copied, and a quarter of a million token strings cost
/// one pass when the file is opened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    ty: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Reads element type, count and elements; every length inside is checked here, once.
    fn read(cursor: &mut Cursor<'a>, depth: u32) -> Result<Array<'a>, ErrorKind> {
        if depth >= MAX_ARRAY_DEPTH {
            let offset = cursor.pos() as u64;
            return Err(ErrorKind::Nesting { place: cursor.place.clone(), offset });
        }
        let ty = ValueType::read(cursor, "array element type")?;
        let count = cursor.u64("array length")?;
        cursor.expect_room("array", count, ty.min_bytes())?;
        // In range: the file has at least `count` more bytes.
        let len = count as usize;
        let start = cursor.pos();
        if ty.is_fixed_size() && ty != ValueType::Bool {
            cursor.take("array", count.saturating_mul(ty.min_bytes()))?;
        } else {
            for _ in 0..len {
                Value::read_as(ty, cursor, depth.saturating_add(1))?;
            }
        }
        Ok(Array { ty, len, bytes: cursor.since(start) })
    }

    /// The elements' type.
    pub fn ty(&self) -> ValueType {
        self.ty
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as the file has them, without type and count.
    pub(super) fn encoded(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut cursor = Cursor::new(self.bytes);
        let ty = self.ty;
        (0..self.len).map(move |_| {
            // The nesting was checked from the outermost array when the file was opened.
            Value::read_as(ty, &mut cursor, 0).expect("checked when the file was opened")
        })
    }
}
