//! Encodes metrics of the table.

use std::collections::BTreeMap;
use std::fmt::Result;

use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet};

use super::reasons::By;
use super::table::{self, Series};
use crate::core::distribution::Distribution;

/// Encodes one metric; `values` writes its samples.
pub(super) fn series(
    encoder: &mut DescriptorEncoder<'_>,
    series: &Series,
    values: impl FnOnce(&mut SampleEncoder<'_>) -> Result,
) -> Result {
    let encoder = encoder.encode_descriptor(base(series), series.help, None, series.kind)?;
    values(&mut SampleEncoder { encoder, series })
}

/// Returns the name without the suffix of counters, which the encoder appends.
pub(super) fn base(series: &Series) -> &'static str {
    series.name.strip_suffix("_total").unwrap_or(series.name)
}

/// Encoder for the samples of one metric.
pub(super) struct SampleEncoder<'a> {
    encoder: MetricEncoder<'a>,
    series: &'a Series,
}

impl SampleEncoder<'_> {
    /// Encodes a counter. `labels` are in the order of the table.
    pub(super) fn counter(&mut self, labels: &[&str], value: impl EncodeCounterValue + Copy) -> Result {
        self.with(labels, |encoder| {
            encoder.encode_counter::<NoLabelSet, _, f64>(&value, None)
        })
    }

    pub(super) fn gauge(&mut self, labels: &[&str], value: f64) -> Result {
        self.with(labels, |encoder| encoder.encode_gauge(&value))
    }

    pub(super) fn histogram(&mut self, labels: &[&str], value: &Distribution) -> Result {
        let bounds = Distribution::BOUNDS.iter().map(std::time::Duration::as_secs_f64);
        let buckets: Vec<(f64, u64)> = bounds
            .chain([f64::INFINITY])
            .zip(value.counts().iter().copied())
            .collect();
        self.with(labels, |encoder| {
            encoder.encode_histogram::<NoLabelSet>(value.sum().as_secs_f64(), value.count(), &buckets, None)
        })
    }

    fn with(&mut self, labels: &[&str], put: impl FnOnce(&mut MetricEncoder<'_>) -> Result) -> Result {
        if labels.is_empty() {
            return put(&mut self.encoder);
        }
        let names = self.series.labels.iter().map(|label| label.name);
        let labels: Vec<(&str, &str)> = names.zip(labels.iter().copied()).collect();
        put(&mut self.encoder.encode_family(&labels)?)
    }
}

/// Converts a count to a gauge value. Exact up to 2^32 - 1, which no count here exceeds.
pub(super) fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Returns the counts with zeros for all missing known values.
pub(super) fn with_all<'a>(
    all: &[&'static str],
    counts: &'a BTreeMap<&'static str, u64>,
) -> BTreeMap<&'a str, u64> {
    let mut each: BTreeMap<&str, u64> = all.iter().map(|word| (*word, 0)).collect();
    each.extend(counts.iter().map(|(word, count)| (*word, *count)));
    each
}

/// Encodes counters with one label.
pub(super) fn count_each(
    values: &mut SampleEncoder<'_>,
    all: &[&'static str],
    counts: &BTreeMap<&'static str, u64>,
) -> Result {
    with_all(all, counts)
        .into_iter()
        .try_for_each(|(word, count)| values.counter(&[word], count))
}

/// Encodes a component's event counter.
pub(super) fn events(
    encoder: &mut DescriptorEncoder<'_>,
    by: By,
    counts: &BTreeMap<&'static str, u64>,
) -> Result {
    let all: Vec<_> = table::events_of(by).collect();
    series(encoder, &table::EVENTS_TOLD, |values| {
        count_each(values, &all, counts)
    })
}
