//! The rotary settings of `config.json`: `rope_parameters` as in transformers 5, `rope_theta` and `rope_scaling` as in version 4.

use serde_json::Value;

use super::config_error::ConfigError;
use super::json::JsonObject;
use crate::rotary::RotaryScaling;

/// Parses base frequency and scaling.
pub(super) fn parse(
    keys: &JsonObject<'_>,
    max_positions: usize,
) -> Result<(f64, RotaryScaling), ConfigError> {
    let theta = keys.number("rope_theta")?.unwrap_or(10_000.0);
    let (key, value) = match (keys.get("rope_parameters"), keys.get("rope_scaling")) {
        (Some(value), _) => ("rope_parameters", value),
        (None, Some(value)) => ("rope_scaling", value),
        (None, None) => return Ok((theta, RotaryScaling::None)),
    };
    let expected = "an object";
    let map =
        value.as_object().ok_or_else(|| ConfigError::Invalid { key, expected, found: value.clone() })?;
    if map.values().any(Value::is_object) {
        return Err(ConfigError::RopeByLayer { key });
    }
    within(&JsonObject(map), theta, max_positions)
        .map_err(|source| ConfigError::Within { key, source: Box::new(source) })
}

fn within(
    keys: &JsonObject<'_>,
    theta: f64,
    max_positions: usize,
) -> Result<(f64, RotaryScaling), ConfigError> {
    let theta = keys.number("rope_theta")?.unwrap_or(theta);
    if let Some(factor) = keys.number("partial_rotary_factor")?.filter(|f| *f != 1.0) {
        return Err(ConfigError::unsupported_rotary_factor(factor));
    }
    let kind = match keys.text("rope_type")? {
        Some(kind) => kind,
        None => keys.text("type")?.unwrap_or("default"),
    };
    Ok((theta, scaling(keys, kind, max_positions)?))
}

fn scaling(keys: &JsonObject<'_>, kind: &str, max_positions: usize) -> Result<RotaryScaling, ConfigError> {
    let required = |key| keys.number(key)?.ok_or(ConfigError::Missing { key });
    match kind {
        "default" => Ok(RotaryScaling::None),
        "linear" => Ok(RotaryScaling::Linear { factor: required("factor")? }),
        "llama3" => {
            let original = keys.number("original_max_position_embeddings")?.unwrap_or(max_positions as f64);
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high <= low {
                return Err(ConfigError::RopeFactors { low, high });
            }
            Ok(RotaryScaling::Llama3 {
                factor: required("factor")?,
                low_frequency_factor: low,
                high_frequency_factor: high,
                original_positions: original,
            })
        }
        other => Err(ConfigError::RopeType { name: other.into() }),
    }
}
