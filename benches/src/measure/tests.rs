//! Whole measurements among threads, correct and faulty.

use ryzanstein_tests::on_loopback;

use super::*;

fn case(what: Collective, dtype: DType) -> Case {
    Case { dtype, ..Case::new(what, 30_000, 7) }
}

#[test]
fn every_operation_and_type_is_right_and_the_same_on_all_ranks() {
    for n in [1, 2, 3, 4] {
        for what in Collective::ALL {
            for dtype in DType::ALL {
                for out_of_place in [false, true] {
                    let usual = case(what, *dtype);
                    if out_of_place != usual.out_of_place && !what.has_both_places() {
                        continue;
                    }
                    let case = Case { out_of_place, ..usual };
                    let figures = on_loopback(n, |group| measure(group, &mut Host, &case).unwrap());
                    let first = &figures[0];
                    assert_eq!((first.errors, first.latency.calls), (0, 7), "{case:?} of {n}");
                    assert!(figures.iter().all(|f| f.latency == first.latency), "{case:?} of {n}");
                }
            }
        }
    }
}

/// A modification of a call.
type Fault = fn(&mut ProcessGroup, &mut CallBuffers<HostBuffer>, Call<'_, HostBuffer>) -> Result<(), Error>;

#[test]
fn calls_that_do_nothing_twice_the_thing_or_a_single_byte_too_much_are_counted_as_wrong() {
    for what in Collective::ALL.into_iter().filter(|what| *what != Collective::Barrier) {
        let errors = |fault: Fault| {
            let measured = |group: &mut ProcessGroup| {
                let case = case(what, DType::I32);
                let faulty: Call<'_, HostBuffer> = &mut |group, slot| {
                    fault(group, slot, &mut |group, slot| what.call(group, slot, case.reduction))
                };
                measure_calls(group, &mut Host, &case, faulty).unwrap().errors
            };
            let of_ranks = on_loopback(2, measured);
            assert_eq!(of_ranks[0], of_ranks[1], "errors are those of all ranks");
            of_ranks[0]
        };
        assert!(errors(|_, _, _| Ok(())) > 0, "{what} that does nothing");
        if what.reduces() {
            let twice = errors(|group, slot, call| call(group, slot).and_then(|()| call(group, slot)));
            assert!(twice > 0, "{what} twice");
        }
        let damage: Fault = |group, slot, call| {
            call(group, slot)?;
            // The first element is part of the result on rank 0, of every operation.
            slot.buffer.view_mut().host()?[0] ^= 1;
            Ok(())
        };
        let case = case(what, DType::I32);
        let calls = (case.warmup + case.iterations) as u64;
        assert!((calls..=2 * calls).contains(&errors(damage)), "{what} with a bit turned");
    }
}

/// A bench that times whole runs, each with a lead-in, as a graph does.
struct Whole(Host);

impl Bench for Whole {
    type Memory = HostBuffer;

    fn slots(&self, _bytes: usize) -> usize {
        3
    }

    fn times_whole_runs(&self) -> bool {
        true
    }

    fn untimed_calls(&self) -> usize {
        1
    }

    fn allocate(&mut self, dtype: DType, elements: usize) -> Result<HostBuffer, Error> {
        self.0.allocate(dtype, elements)
    }

    fn write(&mut self, memory: &mut HostBuffer, content: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        self.0.write(memory, content)
    }

    fn read(&mut self, memory: &HostBuffer, look: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        self.0.read(memory, look)
    }

    fn time(
        &mut self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<HostBuffer>],
        chain: usize,
        call: Call<'_, HostBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        assert_eq!(slots.len(), 3, "every run has all slots");
        for slot in slots {
            (0..chain).try_for_each(|_| call(group, slot))?;
        }
        Ok(vec![Sample { latency_us: 1.0, host_us: 1.0 }])
    }
}

#[test]
fn chains_of_dependent_calls_are_right_for_every_operation_and_type() {
    for what in Collective::ALL {
        for dtype in DType::ALL {
            let all = on_loopback(2, |group| measure(group, &mut Whole(Host), &case(what, *dtype)).unwrap());
            assert_eq!((all[0].errors, all[0].latency.calls), (0, MIN_SAMPLES), "{what} {dtype}");
        }
    }
}

#[test]
fn forms_are_read_as_they_are_written() {
    for what in Collective::ALL {
        for out_of_place in [false, true] {
            let usual = CollectiveForm::from(what);
            let form = CollectiveForm { what, out_of_place };
            if form != usual && !what.has_both_places() {
                continue;
            }
            assert_eq!(form.to_string().parse(), Ok(form));
            let plain = form.to_string().replace('_', "").replace("into", "_into");
            assert_eq!(plain.parse(), Ok(form), "{plain}");
        }
    }
    for wrong in ["barrier_into", "all_to_all_into", "reduceall_into", "_into"] {
        assert!(wrong.parse::<CollectiveForm>().is_err(), "{wrong}");
    }
}
