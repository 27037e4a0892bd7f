//! Host memory for large arrays.

#![expect(
    unsafe_code,
    reason = "advice about memory is unsafe, as some of it loses what is there; and vectors are built from memory without values"
)]

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytemuck::Zeroable;

/// The size of a huge page on most machines. On others, part of an array stays in small pages.
const LARGE_PAGE: usize = 2 << 20;

/// The size of a line of the first-level cache on most machines, and of the longest vectors.
const LINE: usize = 64;

/// Elements that begin with a cache line. So does each row, if rows are whole lines. A vector that crosses two lines takes longer
/// to load, and the allocator puts large arrays 16 bytes into a line.
#[derive(Debug)]
pub(crate) struct Array<T> {
    /// The elements, after some unused ones.
    values: Vec<T>,
    start: usize,
}

impl<T> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[self.start..]
    }
}

impl<T> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[self.start..]
    }
}

impl<T> Default for Array<T> {
    fn default() -> Self {
        Self { values: Vec::new(), start: 0 }
    }
}

impl<T: Copy + Zeroable> From<Vec<T>> for Array<T> {
    fn from(values: Vec<T>) -> Self {
        let mut array = zeros(values.len());
        array.copy_from_slice(&values);
        array
    }
}

#[cfg(target_arch = "x86_64")]
impl<T: Zeroable> Array<T> {
    /// Returns the first `count` elements, with unspecified values. Allocates a new array if this one has fewer.
    pub(crate) fn first(&mut self, count: usize) -> &mut [T] {
        if self.len() < count {
            *self = zeros(count);
        }
        &mut self[..count]
    }
}

/// Returns the number of elements to allocate in addition, so that the others can begin with a line.
const fn spare<T>() -> usize {
    LINE / size_of::<T>()
}

/// Allocates zeros, in huge pages where they fit: page faults on small pages take longer than copying weights into them.
pub(crate) fn zeroed_vector<T: Zeroable>(count: usize) -> Vec<T> {
    // Writes nothing if the memory is fresh from the system, which zeroes it.
    let mut values = bytemuck::zeroed_vec::<T>(count);
    prefer_large_pages(&mut values);
    values
}

/// Allocates an array of zeros, as [`zeroed_vector`] does.
pub(crate) fn zeros<T: Zeroable>(count: usize) -> Array<T> {
    let mut values = zeroed_vector::<T>(count + spare::<T>());
    let start = values.as_ptr().align_offset(LINE).min(spare::<T>());
    values.truncate(start + count);
    Array { values, start }
}

fn prefer_large_pages<T>(values: &mut [T]) {
    let bytes = size_of_val(values);
    let start = values.as_mut_ptr().cast::<u8>();
    let before = start.align_offset(LARGE_PAGE);
    let length = bytes.saturating_sub(before) / LARGE_PAGE * LARGE_PAGE;
    if length > 0 {
        // SAFETY: the range is whole pages within the slice, and the advice does not change their content. If the system
        // ignores it, pages are small.
        let _ = unsafe {
            rustix::mm::madvise(start.add(before).cast(), length, rustix::mm::Advice::LinuxHugepage)
        };
    }
}

/// Builds an array in parts. The thread that computes a part also sets it to zero: one thread would take as long to zero all
/// parts as several threads take to compute the elements.
///
/// # Panics
/// Panics if `fill` omits a part.
pub(crate) fn built<T: Zeroable>(count: usize, fill: impl FnOnce(Part<'_, T>)) -> Array<T> {
    let mut values: Vec<MaybeUninit<T>> = Vec::with_capacity(count + spare::<T>());
    let start = values.as_ptr().align_offset(LINE).min(spare::<T>());
    // SAFETY: the capacity is sufficient, and the elements may have any content.
    unsafe { values.set_len(start + count) };
    prefer_large_pages(&mut values);
    zeroed(&mut values[..start]);
    let set = AtomicUsize::new(0);
    fill(Part { values: &mut values[start..], set: &set });
    assert_eq!(set.into_inner(), count, "every part must be set");
    let mut values = ManuallyDrop::new(values);
    // SAFETY: parts are disjoint, and `zeros` consumes them, so each element is counted at most once. The count shows that all
    // are set; those before the first one are zero. `MaybeUninit` has the size and the alignment of its element.
    let values =
        unsafe { Vec::from_raw_parts(values.as_mut_ptr().cast::<T>(), values.len(), values.capacity()) };
    Array { values, start }
}

/// Part of an array that is being [`built`].
pub(crate) struct Part<'a, T> {
    values: &'a mut [MaybeUninit<T>],
    set: &'a AtomicUsize,
}

impl<'a, T: Zeroable> Part<'a, T> {
    /// Returns its elements, all zero.
    pub(crate) fn zeros(self) -> &'a mut [T] {
        self.set.fetch_add(self.values.len(), Relaxed);
        zeroed(self.values)
    }

    /// Splits it into parts, as `chunks_mut` does.
    pub(crate) fn chunks(self, size: usize) -> impl ExactSizeIterator<Item = Self> {
        let set = self.set;
        self.values.chunks_mut(size).map(move |values| Self { values, set })
    }

    /// Splits it by columns, `block` at a time, if it is rows of `width`.
    pub(crate) fn columns(self, width: usize, block: usize) -> Vec<Columns<'a, T>> {
        let rows = self.values.len() / width;
        let empty = || Columns { rows: Vec::with_capacity(rows) };
        let mut blocks: Vec<_> = (0..width.div_ceil(block)).map(|_| empty()).collect();
        let set = self.set;
        for row in self.values.chunks_mut(width) {
            for (block, values) in blocks.iter_mut().zip(row.chunks_mut(block)) {
                block.rows.push(Row::Unset(Self { values, set }));
            }
        }
        blocks
    }
}

/// Some columns of a [`Part`].
pub(crate) struct Columns<'a, T> {
    rows: Vec<Row<'a, T>>,
}

enum Row<'a, T> {
    Unset(Part<'a, T>),
    Set(&'a mut [T]),
}

impl<T: Zeroable> Columns<'_, T> {
    pub(crate) fn row_count(&self) -> usize {
        self.rows.len()
    }

    /// Returns the elements of a row, which are initially zero. They are zeroed only now, so that they are in the cache when they
    /// are computed.
    pub(crate) fn row(&mut self, at: usize) -> &mut [T] {
        let row = &mut self.rows[at];
        if let Row::Unset(part) = row {
            let part = Part { values: std::mem::take(&mut part.values), set: part.set };
            *row = Row::Set(part.zeros());
        }
        match row {
            Row::Set(values) => values,
            Row::Unset(_) => unreachable!("it has just been set"),
        }
    }
}

fn zeroed<T: Zeroable>(values: &mut [MaybeUninit<T>]) -> &mut [T] {
    let (start, count) = (values.as_mut_ptr(), values.len());
    // SAFETY: the elements are within the array, and zero is a valid value of their type.
    unsafe {
        start.write_bytes(0, count);
        std::slice::from_raw_parts_mut(start.cast::<T>(), count)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::{LARGE_PAGE, LINE, built, zeros};

    #[test]
    fn all_are_zero_whatever_their_number() {
        let page = LARGE_PAGE / size_of::<bf16>();
        for count in [0, 1, page - 1, page, 2 * page + 3, 5 * page] {
            let mut values = zeros::<bf16>(count);
            assert!(values.len() == count && values.iter().all(|v| *v == bf16::ZERO), "{count}");
            assert!(values.as_ptr().addr().is_multiple_of(LINE), "{count}");
            // Memory that is freed and allocated again must be zero again.
            values.fill(bf16::ONE);
        }
    }

    #[test]
    fn what_is_built_is_what_its_parts_were_set_to() {
        let values = built::<u32>(10, |all| {
            std::thread::scope(|scope| {
                for (i, part) in all.chunks(4).enumerate() {
                    scope.spawn(move || {
                        let values = part.zeros();
                        assert!(values.iter().all(|value| *value == 0));
                        values[0] = i as u32 + 1;
                    });
                }
            });
        });
        assert_eq!(*values, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0]);
        assert!(values.as_ptr().addr().is_multiple_of(LINE));
        assert!(built::<u32>(0, |_| ()).is_empty());
        let values = built::<u32>(10, |all| {
            for (i, mut columns) in all.columns(5, 3).into_iter().enumerate() {
                (0..columns.row_count()).for_each(|row| columns.row(row)[1] = i as u32 + 1);
            }
        });
        assert_eq!(*values, [0, 1, 0, 0, 2, 0, 1, 0, 0, 2]);
    }

    #[test]
    #[should_panic(expected = "every part must be set")]
    fn a_part_that_is_left_out_is_noticed() {
        built::<u32>(3, |all| {
            all.chunks(2).next().map(super::Part::zeros);
        });
    }
}
