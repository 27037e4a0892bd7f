//! The latency and bandwidth of a link from measured times.

use super::{Cost, Link};

/// Why measured times do not determine a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FitError {
    /// A time or a cost that no measurement has.
    #[error("point {0} is not a measurement: its time must be above 0 and its bytes at least 0, both finite")]
    Point(usize),
    /// No two points tell latency from bandwidth.
    #[error("the points do not differ in their bytes per step; measure at least two sizes, best far apart")]
    Undetermined,
    /// More bytes do not take longer.
    #[error("time does not grow with the bytes, so there is no bandwidth to find; measure larger sizes")]
    Flat,
}

impl Link {
    /// The link on which these costs take these seconds, as nearly as one link can: by least squares of the relative errors, so
    /// that small messages, which determine the latency, count as much as large ones. The latency is at least 0. For plain
    /// pairs of bytes and seconds, the costs are [`Cost::message`].
    ///
    /// ```
    /// use ryzanstein_orchestrator::cost::{Cost, Link};
    ///
    /// let points = [(1e3, 11e-6), (1e6, 110e-6), (1e8, 10.01e-3)].map(|(bytes, s)| (Cost::message(bytes), s));
    /// let link = Link::fit(&points).unwrap();
    /// assert!((link.latency - 10e-6).abs() < 2e-6 && (link.bandwidth - 10e9).abs() < 0.1e9);
    /// ```
    ///
    /// # Errors
    /// When a point is no measurement, or the points do not determine a latency and a bandwidth.
    pub fn fit(points: &[(Cost, f64)]) -> Result<Self, FitError> {
        // Both unknowns are factors: seconds ≈ latency · steps + inverse · bytes. Divided by the seconds, the left side is 1.
        let (mut ss, mut sb, mut bb, mut s1, mut b1) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (index, (cost, seconds)) in points.iter().enumerate() {
            let is_point =
                *seconds > 0.0 && seconds.is_finite() && cost.bytes >= 0.0 && cost.bytes.is_finite();
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
        // What rounding leaves of a determinant that is zero.
        if determinant <= 1e-12 * ss * bb {
            return Err(FitError::Undetermined);
        }
        let latency = (s1 * bb - b1 * sb) / determinant;
        let (latency, inverse) =
            if latency > 0.0 { (latency, (ss * b1 - sb * s1) / determinant) } else { (0.0, b1 / bb) };
        if inverse <= 0.0 {
            return Err(FitError::Flat);
        }
        Ok(Self { latency, bandwidth: 1.0 / inverse })
    }
}
