//! Interconnects with their published figures.

use std::fmt;
use std::str::FromStr;

use ryzanstein_process_group::schedule::cost::LinkCost;

/// A kind of link between ranks. Bandwidths are the published ones of one direction, before protocol overhead; measured ones
/// are lower.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interconnect {
    /// PCI Express 3.0, 16 lanes: 8 GT/s with 128b/130b encoding, 15.75 GB/s (PCI-SIG, PCI Express Base Specification 3.0).
    Pcie3,
    /// PCI Express 4.0, 16 lanes: 16 GT/s, 31.51 GB/s (PCI Express Base Specification 4.0).
    Pcie4,
    /// PCI Express 5.0, 16 lanes: 32 GT/s, 63.02 GB/s (PCI Express Base Specification 5.0).
    Pcie5,
    /// NVLink 2 of a V100: 6 links of 25 GB/s, 150 GB/s; both directions together are the 300 GB/s of NVIDIA's "Tesla V100 GPU
    /// Architecture" whitepaper.
    NvLink2,
    /// NVLink 3 of an A100: 12 links of 25 GB/s, 300 GB/s; both directions together are the 600 GB/s of NVIDIA's "A100 Tensor
    /// Core GPU Architecture" whitepaper.
    NvLink3,
    /// NVLink 4 of an H100 or H200: 18 links of 25 GB/s, 450 GB/s; both directions together are the 900 GB/s of NVIDIA's "H100
    /// Tensor Core GPU Architecture" whitepaper.
    NvLink4,
    /// NVLink 5 of a B200, and of GB200 NVL72, whose switches join 72 GPUs of 18 hosts: 18 links of 50 GB/s, 900 GB/s; both
    /// directions together are the 1.8 TB/s of NVIDIA's "Blackwell Architecture Technical Brief".
    NvLink5,
    /// InfiniBand HDR, 4 lanes: 200 Gb/s, 25 GB/s (InfiniBand Trade Association, InfiniBand Roadmap).
    InfinibandHdr,
    /// InfiniBand NDR, 4 lanes: 400 Gb/s, 50 GB/s (InfiniBand Roadmap).
    InfinibandNdr,
    /// 10 Gb/s Ethernet, 1.25 GB/s (IEEE 802.3ae).
    Ethernet10,
    /// 25 Gb/s Ethernet, 3.125 GB/s (IEEE 802.3by).
    Ethernet25,
    /// 100 Gb/s Ethernet, 12.5 GB/s (IEEE 802.3ba).
    Ethernet100,
}

/// A name that is not an interconnect.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no interconnect `{name}`; there are {}", Interconnect::ALL.map(Interconnect::name).join(", "))]
pub struct UnknownInterconnect {
    /// The name.
    pub name: String,
}

impl Interconnect {
    /// All interconnects.
    pub const ALL: [Self; 12] = [
        Self::Pcie3,
        Self::Pcie4,
        Self::Pcie5,
        Self::NvLink2,
        Self::NvLink3,
        Self::NvLink4,
        Self::NvLink5,
        Self::InfinibandHdr,
        Self::InfinibandNdr,
        Self::Ethernet10,
        Self::Ethernet25,
        Self::Ethernet100,
    ];

    /// Returns the name in flags and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pcie3 => "pcie3",
            Self::Pcie4 => "pcie4",
            Self::Pcie5 => "pcie5",
            Self::NvLink2 => "nvlink2",
            Self::NvLink3 => "nvlink3",
            Self::NvLink4 => "nvlink4",
            Self::NvLink5 => "nvlink5",
            Self::InfinibandHdr => "hdr",
            Self::InfinibandNdr => "ndr",
            Self::Ethernet10 => "10gbe",
            Self::Ethernet25 => "25gbe",
            Self::Ethernet100 => "100gbe",
        }
    }

    /// Returns the bandwidth of one direction in GB/s (10⁹ bytes per second).
    pub const fn gigabytes_per_second(self) -> f64 {
        /// Returns the bandwidth of 16 lanes, from the giga-transfers of a lane, of which 128 of 130 bits are data.
        const fn pcie(transfers: f64) -> f64 {
            transfers * 16.0 / 8.0 * 128.0 / 130.0
        }
        match self {
            Self::Pcie3 => pcie(8.0),
            Self::Pcie4 => pcie(16.0),
            Self::Pcie5 => pcie(32.0),
            Self::NvLink2 => 150.0,
            Self::NvLink3 => 300.0,
            Self::NvLink4 => 450.0,
            Self::NvLink5 => 900.0,
            Self::InfinibandHdr => 25.0,
            Self::InfinibandNdr => 50.0,
            Self::Ethernet10 => 1.25,
            Self::Ethernet25 => 3.125,
            Self::Ethernet100 => 12.5,
        }
    }

    /// Returns the seconds of a step that moves nothing. For NVLink, PCI Express and InfiniBand, these are NCCL's own constants
    /// of a step of a ring with the protocol LL (`hwLatencies` in `src/graph/tuning.cc` of NCCL). For Ethernet, it is an
    /// assumption: a message of TCP through two kernels and a switch.
    pub const fn latency(self) -> f64 {
        match self {
            Self::NvLink2 | Self::NvLink3 | Self::NvLink4 | Self::NvLink5 => 0.6e-6,
            Self::Pcie3 | Self::Pcie4 | Self::Pcie5 => 1.0e-6,
            Self::InfinibandHdr | Self::InfinibandNdr => 2.7e-6,
            Self::Ethernet10 | Self::Ethernet25 | Self::Ethernet100 => 25e-6,
        }
    }

    /// Returns latency and bandwidth, for the cost model.
    pub const fn cost(self) -> LinkCost {
        LinkCost { latency: self.latency(), message: 0.0, byte: 1e-9 / self.gigabytes_per_second() }
    }
}

impl fmt::Display for Interconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Interconnect {
    type Err = UnknownInterconnect;

    fn from_str(name: &str) -> Result<Self, UnknownInterconnect> {
        let known = Self::ALL.into_iter().find(|interconnect| interconnect.name() == name);
        known.ok_or_else(|| UnknownInterconnect { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_interconnect_is_found_by_its_name() {
        for interconnect in Interconnect::ALL {
            assert_eq!(interconnect.name().parse(), Ok(interconnect));
            assert_eq!(interconnect.to_string(), interconnect.name());
        }
        let error = "token ring".parse::<Interconnect>().unwrap_err().to_string();
        assert!(error.contains("`token ring`") && error.contains("nvlink4"), "{error}");
        assert!((Interconnect::Pcie4.gigabytes_per_second() - 31.508).abs() < 0.01);
    }
}
