//! Process metrics, read at each scrape.

use std::fmt::Result;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rustix::process::{Resource, getrlimit};

use super::encode::{number, series};
use super::table;

#[derive(Debug)]
pub(super) struct ProcessMetrics {
    /// Unix time in seconds.
    started: f64,
}

impl ProcessMetrics {
    pub(super) fn of_this_one() -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            started: started.as_secs_f64(),
        }
    }
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        if let Some(seconds) = processor_time(&stat, rustix::param::clock_ticks_per_second()) {
            series(&mut encoder, &table::CPU, |values| values.counter(&[], seconds))?;
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        for (row, value) in [
            (&table::RESIDENT, bytes(&status, "VmRSS:")),
            (&table::VIRTUAL, bytes(&status, "VmSize:")),
            (&table::OPEN_FILES, open_files()),
            (&table::MOST_FILES, most_files()),
            (&table::STARTED, Some(self.started)),
        ] {
            if let Some(value) = value {
                series(&mut encoder, row, |values| values.gauge(&[], value))?;
            }
        }
        Ok(())
    }
}

/// Parses CPU seconds from `proc_pid_stat(5)`: the name in parentheses may contain anything; utime and stime are the
/// 12th and 13th fields after it.
fn processor_time(stat: &str, ticks_per_second: u64) -> Option<f64> {
    let (_, after) = stat.rsplit_once(')')?;
    let mut fields = after.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    let all = f64::from(ticks()?) + f64::from(ticks()?);
    Some(all / f64::from(u32::try_from(ticks_per_second).ok()?))
}

/// Parses a value of `proc_pid_status(5)`, given in kibibytes.
fn bytes(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u32 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(f64::from(kibibytes) * 1024.0)
}

fn open_files() -> Option<f64> {
    // Excludes the descriptor that reads the directory.
    let count = std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1);
    u32::try_from(count).ok().map(f64::from)
}

/// The soft limit; none if there is no limit.
fn most_files() -> Option<f64> {
    let limit = getrlimit(Resource::Nofile).current?;
    Some(number(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_parsed_from_proc_files() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 1 0 12 1 1";
        assert_eq!(processor_time(stat, 100), Some(3.0));
        assert_eq!(
            bytes("Name:\tx\nVmRSS:\t    1024 kB\n", "VmRSS:"),
            Some(1_048_576.0)
        );
        for nothing in ["", "7 (a)", "7 (a) S 1"] {
            assert_eq!(processor_time(nothing, 100), None);
        }
    }

    #[test]
    fn this_process_has_all_metrics() {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(processor_time(&stat, rustix::param::clock_ticks_per_second()).is_some());
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(bytes(&status, "VmRSS:").unwrap() < bytes(&status, "VmSize:").unwrap());
        assert!(open_files().unwrap() < most_files().unwrap());
    }
}
