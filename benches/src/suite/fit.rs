//! The latency and bandwidth of a link from measured times.

use ryzanstein_process_group::schedule::cost::LinkCost;

/// The cost of a call on its critical path.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Cost {
    /// Number of consecutive messages.
    pub(super) steps: usize,
    /// Bytes that a rank sends, or receives if that is more, in these steps.
    pub(super) bytes: f64,
}

impl Cost {
    /// Returns the seconds on a link: α · steps + β · bytes.
    pub(super) fn seconds(self, link: LinkCost) -> f64 {
        self.steps as f64 * link.latency + self.bytes * link.byte
    }
}

/// The reason why measured times do not determine a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum FitError {
    /// A time or a cost that is not a measurement.
    #[error("point {0} is not a measurement: its time must be above 0 and its bytes at least 0, both finite")]
    Point(usize),
    /// No two points separate latency from bandwidth.
    #[error("the points do not differ in their bytes per step; measure at least two sizes, best far apart")]
    Undetermined,
    /// More bytes do not take longer.
    #[error("time does not grow with the bytes, so there is no bandwidth to find; measure larger sizes")]
    Flat,
}

/// Fits the link on which these costs take these seconds, as nearly as one link can: by least squares of the relative errors,
/// so that small messages, which determine the latency, count as much as large ones. The latency is at least 0.
///
/// # Errors
/// Fails when a point is not a measurement, or the points do not determine a latency and a bandwidth.
pub(super) fn fit(points: &[(Cost, f64)]) -> Result<LinkCost, FitError> {
    // Both unknowns are factors: seconds ≈ latency · steps + inverse · bytes. Divided by the seconds, the left side is 1.
    let (mut ss, mut sb, mut bb, mut s1, mut b1) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (index, (cost, seconds)) in points.iter().enumerate() {
        let is_point = *seconds > 0.0 && seconds.is_finite() && cost.bytes >= 0.0 && cost.bytes.is_finite();
        if !is_point {
            return Err(FitError::Point(index));
        }
        let (steps, bytes) = (cost.steps as f64 / seconds, cost.bytes / seconds);
        ss += steps * steps;
        sb += steps * bytes;
        bb += bytes * bytes;
        s1 += steps;
        b1 += bytes;
    }
    let determinant = ss * bb - sb * sb;
    // Rounding residue of a determinant that is zero.
    if determinant <= 1e-12 * ss * bb {
        return Err(FitError::Undetermined);
    }
    let latency = (s1 * bb - b1 * sb) / determinant;
    let (latency, inverse) =
        if latency > 0.0 { (latency, (ss * b1 - sb * s1) / determinant) } else { (0.0, b1 / bb) };
    if inverse <= 0.0 {
        return Err(FitError::Flat);
    }
    Ok(LinkCost { latency, message: 0.0, byte: inverse })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn message(bytes: f64) -> Cost {
        Cost { steps: 1, bytes }
    }

    fn is_close(a: f64, b: f64, relative: f64) -> bool {
        (a - b).abs() <= relative * a.abs().max(b.abs())
    }

    proptest! {
        #[test]
        fn a_fit_of_noisy_times_is_as_near_as_the_noise(
            noise in proptest::collection::vec(0.95..1.05f64, 11), latency in 1e-6..1e-4f64, byte in 1e-11..1e-9f64,
        ) {
            let link = LinkCost { latency, message: 0.0, byte };
            let sizes = (0..11).map(|power| message(8f64.powi(power)));
            let points: Vec<_> = sizes.zip(noise).map(|(cost, noise)| (cost, cost.seconds(link) * noise)).collect();
            let fitted = fit(&points).unwrap();
            prop_assert!(is_close(fitted.latency, latency, 0.1) && is_close(fitted.byte, byte, 0.2), "{fitted:?}");
        }

        #[test]
        fn a_fit_recovers_latency_and_bandwidth(latency in 1e-7..1e-3f64, byte in 1e-12..1e-8f64, steps in 1..30usize) {
            let link = LinkCost { latency, message: 0.0, byte };
            let sizes = (0..11).map(|power| Cost { steps, bytes: 1e3 * 4f64.powi(power) });
            let points: Vec<_> = sizes.map(|cost| (cost, cost.seconds(link))).collect();
            let fitted = fit(&points).unwrap();
            prop_assert!(is_close(fitted.latency, latency, 1e-4), "{fitted:?}");
            prop_assert!(is_close(fitted.byte, byte, 1e-4), "{fitted:?}");
        }
    }

    #[test]
    fn points_that_determine_no_link_are_refused_with_the_reason() {
        let fit = |points: &[(f64, f64)]| {
            let points: Vec<_> = points.iter().map(|(bytes, seconds)| (message(*bytes), *seconds)).collect();
            super::fit(&points)
        };
        assert_eq!(fit(&[]), Err(FitError::Undetermined));
        assert_eq!(fit(&[(1e3, 1e-6)]), Err(FitError::Undetermined));
        assert_eq!(fit(&[(1e3, 1e-6), (1e3, 2e-6)]), Err(FitError::Undetermined));
        assert_eq!(fit(&[(1e3, 2e-6), (1e6, 1e-6)]), Err(FitError::Flat));
        assert_eq!(fit(&[(1e3, 1e-6), (1e6, 0.0)]), Err(FitError::Point(1)));
        assert_eq!(fit(&[(f64::NAN, 1e-6)]), Err(FitError::Point(0)));
        // Faster than any latency allows.
        let link = fit(&[(1e3, 0.5e-6), (1e6, 1e-3)]).unwrap();
        assert!(link.latency == 0.0 && link.byte > 0.0);
    }
}
