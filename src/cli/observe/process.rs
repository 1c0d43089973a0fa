//! Facts of the process, read when somebody asks.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

/// This process.
#[derive(Debug)]
pub(super) struct Process {
    /// Seconds since 1970.
    started: f64,
}

impl Process {
    pub(super) fn of_this_one() -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            started: started.as_secs_f64(),
        }
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut put = |name: &str, help: &str, value: Option<f64>| {
            let Some(value) = value else { return Ok(()) };
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)
        };
        put(
            "process_start_time_seconds",
            "When the process was started, in seconds since 1970",
            Some(self.started),
        )?;
        put(
            "process_resident_memory_bytes",
            "Memory that is resident, in bytes",
            resident(),
        )?;
        put("process_open_fds", "File descriptors that are open", open_files())
    }
}

fn resident() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u32 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(f64::from(kibibytes) * 1024.0)
}

fn open_files() -> Option<f64> {
    // One of them is the directory that is read.
    let count = std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1);
    u32::try_from(count).ok().map(f64::from)
}

/// A truth that somebody else keeps.
pub(super) struct Followed {
    name: &'static str,
    help: &'static str,
    holds: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Followed {
    pub(super) fn new(
        name: &'static str,
        help: &'static str,
        holds: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        let holds = Box::new(holds);
        Self { name, help, holds }
    }
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Followed")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Collector for Followed {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let gauge = ConstGauge::new(i64::from((self.holds)()));
        let metric = encoder.encode_descriptor(self.name, self.help, None, gauge.metric_type())?;
        gauge.encode(metric)
    }
}
