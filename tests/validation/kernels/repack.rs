//! Repacking: every byte of every block to its plane, in Q5_K every bit.

use gpu_kernels::blocks::GgmlType;
use gpu_kernels::layout::{plane_offsets, planes};
use host::gpu::ops::{Matrix, OpError, repack};

use super::{Random, devices};

/// Planes of a file's blocks, one byte at a time.
fn oracle(ty: GgmlType, file: &[u8], n_blocks: usize, size: usize) -> Vec<u8> {
    let offsets = plane_offsets(ty, n_blocks as u64).expect("small");
    let mut device = vec![0xee; size];
    for (i, byte) in file.iter().enumerate() {
        let (block, at) = (i / ty.block_bytes(), i % ty.block_bytes());
        let (plane, field) = planes(ty)
            .iter()
            .enumerate()
            .find(|(_, plane)| (plane.field..plane.field + plane.bytes).contains(&at))
            .expect("every byte has a plane");
        device[offsets[plane] as usize + block * field.bytes + at - field.field] = *byte;
    }
    if ty == GgmlType::Q5K {
        for (block, file) in file.chunks(ty.block_bytes()).enumerate() {
            let (chunks, rests) = q5_k(file);
            device[offsets[0] as usize + 128 * block..][..128].copy_from_slice(&chunks);
            device[offsets[1] as usize + 32 * block..][..32].copy_from_slice(&rests);
        }
    }
    device
}

/// A block's chunks and what belongs to them, one value at a time: byte `b` of a chunk has value `b` of one half sub-block,
/// and the upper bits of value `b` of another.
fn q5_k(file: &[u8]) -> ([u8; 128], [u8; 32]) {
    let (qh, qs) = (&file[16..48], &file[48..176]);
    let value = |element: usize| {
        let (sub_block, at) = (element / 32, element % 32);
        let nibble = qs[sub_block / 2 * 32 + at] >> (sub_block % 2 * 4) & 15;
        nibble + 16 * (qh[at] >> sub_block & 1)
    };
    let (mut chunks, mut rests) = ([0; 128], [0; 32]);
    for (at, packed) in chunks.iter_mut().enumerate() {
        let (chunk, byte) = (at / 16, at % 16);
        let first = value(chunk / 2 * 64 + chunk % 2 * 16 + byte);
        let second = value(chunk / 2 * 64 + 32 + chunk % 2 * 16 + byte);
        *packed = first + 32 * (second / 4);
        rests[chunk * 4 + byte % 4] |= (second % 4) << (byte / 4 * 2);
    }
    (chunks, rests)
}

devices! {
    fn repack_moves_every_byte_to_its_plane(device) {
        let mut random = Random::new(1);
        for &ty in GgmlType::ALL {
            // 29 blocks a row are not a multiple of anything here; float types need whole chunks.
            let cols = 29 * ty.block_elems().max(8) as u32;
            let matrix_bytes = Matrix::size_bytes(ty, 1, 3, cols).expect("possible") as usize;
            let buffer = device.alloc_from(&vec![0xeeu8; matrix_bytes]).expect("memory");
            let w = Matrix::new(buffer.slice(), ty, 1, 3, cols).expect("possible");
            let file = random.bytes(w.n_blocks() as usize * ty.block_bytes());
            // In two launches, as a staging buffer smaller than the tensor does it.
            let split = 31 * ty.block_bytes();
            let raw = device.alloc_from(&file).expect("memory");
            let second = device.alloc_from(&file[split..]).expect("memory");
            repack(device, raw.part(..split).expect("inside"), w, 0).expect("first part");
            repack(device, second.slice(), w, 31).expect("second part");
            let got = device.download_vec(buffer.slice()).expect("download");
            assert!(got == oracle(ty, &file, w.n_blocks() as usize, matrix_bytes), "{ty}");
        }
    }

    fn repack_refuses_what_does_not_fit(device) {
        let buffer = device.alloc::<u8>(1024).expect("memory");
        let w = Matrix::new(buffer.slice(), GgmlType::Q8_0, 1, 4, 64).expect("eight blocks");
        let raw = device.alloc_zeroed::<u8>(34 * 9).expect("memory");
        let refused = |result| matches!(result, Err(OpError::Operand { .. }));
        assert!(refused(repack(device, raw.slice(), w, 0)), "nine blocks into eight");
        assert!(refused(repack(device, raw.part(..34).expect("inside"), w, 8)), "block 8 of 0..8");
        assert!(refused(repack(device, raw.part(..33).expect("inside"), w, 0)), "less than a block");
        assert!(refused(repack(device, raw.part(..34).expect("inside"), w, u64::MAX)), "overflow");
        assert!(repack(device, raw.part(..0).expect("inside"), w, 8).is_ok(), "nothing to do");
        assert!(Matrix::new(buffer.slice(), GgmlType::Q8_0, 1, 4, 48).is_err(), "no whole blocks");
        assert!(Matrix::new(buffer.slice(), GgmlType::Q8_0, 0, 4, 64).is_err(), "no experts");
        assert!(Matrix::new(buffer.slice(), GgmlType::Q8_0, 9, 4, 64).is_err(), "too small");
        assert!(Matrix::size_bytes(GgmlType::F32, u32::MAX, 1 << 26, 1 << 26).is_none(), "overflow");
    }
}
