//! The parameters of a call in 24 bytes: operation, reduction, element type, 0, root u32, count u64, composed call u32, 4 × 0,
//! little endian.

use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Composed, Operation, ReduceOp};
use crate::types::rank::Rank;

/// Bytes of a fingerprint.
pub(crate) const BYTES: usize = 24;

const OPERATIONS: usize = 11;

fn number(operation: Operation) -> u8 {
    match operation {
        Operation::AllReduce(_) => 0,
        Operation::Broadcast { .. } => 1,
        Operation::Reduce { .. } => 2,
        Operation::AllGather => 3,
        Operation::ReduceScatter(_) => 4,
        Operation::Gather { .. } => 5,
        Operation::Scatter { .. } => 6,
        Operation::AllToAll => 7,
        Operation::Send { .. } => 8,
        Operation::Recv { .. } => 9,
        Operation::Barrier => 10,
    }
}

fn operation(number: u8, op: ReduceOp, root: Rank) -> Option<Operation> {
    const _: () = assert!(OPERATIONS == 11);
    Some(match number {
        0 => Operation::AllReduce(op),
        1 => Operation::Broadcast { root },
        2 => Operation::Reduce { op, root },
        3 => Operation::AllGather,
        4 => Operation::ReduceScatter(op),
        5 => Operation::Gather { root },
        6 => Operation::Scatter { root },
        7 => Operation::AllToAll,
        8 => Operation::Send { to: root },
        9 => Operation::Recv { from: root },
        10 => Operation::Barrier,
        _ => return None,
    })
}

pub(crate) fn pack(fingerprint: &CallFingerprint) -> [u8; BYTES] {
    let CallFingerprint { operation, dtype, count, composed } = *fingerprint;
    let root = operation.root().or(operation.peer()).unwrap_or_default();
    let op = operation.reduce_op().unwrap_or(ReduceOp::Sum);
    let mut bytes = [0; BYTES];
    bytes[..3].copy_from_slice(&[number(operation), op as u8, dtype as u8]);
    bytes[4..8].copy_from_slice(&root.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&(count as u64).to_le_bytes());
    bytes[16..20].copy_from_slice(&composed.0.to_le_bytes());
    bytes
}

/// Returns `None` for bytes that no rank of this version sends.
pub(crate) fn unpack(bytes: &[u8; BYTES]) -> Option<CallFingerprint> {
    let [head, count, tail] = *bytes.as_chunks::<8>().0 else { return None };
    let ([kind, op, dtype, 0, a, b, c, d], [e, f, g, h, 0, 0, 0, 0]) = (head, tail) else { return None };
    let op = *ReduceOp::ALL.get(usize::from(op))?;
    let root = Rank(u32::from_le_bytes([a, b, c, d]));
    Some(CallFingerprint {
        operation: operation(kind, op, root)?,
        dtype: DType::from_wire(dtype)?,
        count: usize::try_from(u64::from_le_bytes(count)).ok()?,
        composed: Composed(u32::from_le_bytes([e, f, g, h])),
    })
}

#[cfg(test)]
pub(crate) use tests::any_fingerprint;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn any_fingerprint() -> impl Strategy<Value = CallFingerprint> {
        let parts = (0..OPERATIONS as u8, 0..5usize, any::<u32>(), 0..10u8, 0..usize::MAX, any::<u32>());
        parts.prop_map(|(kind, op, root, dtype, count, composed)| CallFingerprint {
            operation: operation(kind, ReduceOp::ALL[op], Rank(root)).expect("a number of an operation"),
            dtype: DType::from_wire(dtype).expect("a number of a type"),
            count,
            composed: Composed(composed),
        })
    }

    proptest! {
        #[test]
        fn fingerprints_survive_the_wire(fingerprint in any_fingerprint()) {
            prop_assert_eq!(unpack(&pack(&fingerprint)), Some(fingerprint));
        }

        #[test]
        fn any_bytes_unpack_to_what_packs_to_them_again_or_to_nothing(
            mut bytes: [u8; BYTES], numbers in (0..=OPERATIONS as u8, 0..=5u8, 0..=10u8, 0..=1u8),
        ) {
            bytes[..4].copy_from_slice(&<[u8; 4]>::from(numbers));
            bytes[20..].fill(0);
            if let Some(fingerprint) = unpack(&bytes) {
                prop_assert_eq!(unpack(&pack(&fingerprint)), Some(fingerprint));
            }
        }
    }
}
