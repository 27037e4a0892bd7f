//! Host memory for large arrays.

use bytemuck::Zeroable;

/// The size of a large page on most machines. On others, part of an array stays in small pages.
const LARGE_PAGE: usize = 2 << 20;

/// A vector of zeros, in large pages where they fit: page faults on small pages take longer than copying weights into them.
pub(crate) fn zeros<T: Zeroable>(count: usize) -> Vec<T> {
    // Writes nothing: memory fresh from the system is zero.
    let mut values = bytemuck::zeroed_vec::<T>(count);
    let bytes = size_of_val(&values[..]);
    let start = values.as_mut_ptr().cast::<u8>();
    let before = start.align_offset(LARGE_PAGE);
    let length = bytes.saturating_sub(before) / LARGE_PAGE * LARGE_PAGE;
    if length > 0 {
        #[expect(unsafe_code, reason = "advice about memory is unsafe, as some of it loses what is there")]
        // SAFETY: the range is whole pages within the vector, and the advice does not change their content. If the system
        // ignores it, pages are small.
        let _ = unsafe {
            rustix::mm::madvise(start.add(before).cast(), length, rustix::mm::Advice::LinuxHugepage)
        };
    }
    values
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::{LARGE_PAGE, zeros};

    #[test]
    fn all_are_zero_whatever_their_number() {
        let page = LARGE_PAGE / size_of::<bf16>();
        for count in [0, 1, page - 1, page, 2 * page + 3, 5 * page] {
            let mut values = zeros::<bf16>(count);
            assert!(values.len() == count && values.iter().all(|v| *v == bf16::ZERO), "{count}");
            // What is freed and taken again is zero again.
            values.fill(bf16::ONE);
        }
    }
}
