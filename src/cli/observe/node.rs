//! The companion's metrics.

use std::fmt::Result;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::watch;

use super::encode::{count_each, number, series};
use super::reasons::{By, REFUSALS};
use super::table::{CLAIMS, HEALTH, RESULTS};
use super::{encode, table};
use crate::node::kubelet::transport::{GrpcCalls, GrpcMethod};
use crate::node::metrics::{Metrics, MetricsSnapshot, Omission, SliceCounts};
use crate::node::publish::inventory::RegistrationStatus;

/// Collector that reads the current metrics at each scrape.
#[derive(Debug)]
pub(super) struct NodeMetrics {
    pub(super) metrics: Arc<Metrics>,
    pub(super) registration_status: watch::Receiver<RegistrationStatus>,
}

impl Collector for NodeMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result {
        let ready = self.registration_status.borrow().ready;
        series(&mut encoder, &table::NODE_READY, |values| {
            values.gauge(&[], f64::from(u8::from(ready)))
        })?;
        let counted = self.metrics.counted();
        stock(&mut encoder, &counted)?;
        operations(&mut encoder, &counted)?;
        slices(&mut encoder, &counted)?;
        encode::events(&mut encoder, By::Companion, &counted.events)?;
        calls(&mut encoder, &self.metrics.calls)
    }
}

fn stock(encoder: &mut DescriptorEncoder<'_>, counted: &MetricsSnapshot) -> Result {
    let [healthy, unhealthy] = HEALTH;
    series(encoder, &table::DEVICES, |values| {
        for (group, count) in &counted.devices {
            let health = if group.healthy { healthy } else { unhealthy };
            values.gauge(&[&group.kind, health, group.owner.name()], number(*count))?;
        }
        Ok(())
    })?;
    let [held, quarantined] = CLAIMS;
    series(encoder, &table::NODE_CLAIMS, |values| {
        values.gauge(&[held], number(counted.held))?;
        values.gauge(&[quarantined], number(counted.quarantined))
    })
}

fn operations(encoder: &mut DescriptorEncoder<'_>, counted: &MetricsSnapshot) -> Result {
    series(encoder, &table::OPERATIONS, |values| {
        for operation in Metrics::OPERATIONS {
            for (result, done) in RESULTS.into_iter().zip([true, false]) {
                let count = counted.operations.get(&(operation, done));
                values.counter(&[operation, result], count.copied().unwrap_or_default())?;
            }
        }
        Ok(())
    })?;
    series(encoder, &table::NODE_REFUSALS, |values| {
        count_each(values, &REFUSALS.map(|(word, _)| word), &counted.refusals)
    })
}

fn slices(encoder: &mut DescriptorEncoder<'_>, counted: &MetricsSnapshot) -> Result {
    let SliceCounts {
        slices,
        devices,
        omitted,
    } = &counted.slices;
    series(encoder, &table::SLICES, |values| {
        values.gauge(&[], number(*slices))
    })?;
    series(encoder, &table::SLICE_DEVICES, |values| {
        values.gauge(&[], number(*devices))
    })?;
    series(encoder, &table::SLICE_OMISSIONS, |values| {
        for why in Omission::ALL {
            let count = omitted.get(&why).copied().unwrap_or_default();
            values.gauge(&[why.name()], number(count))?;
        }
        Ok(())
    })?;
    series(encoder, &table::SLICE_WRITES, |values| {
        count_each(values, &Metrics::SLICE_WRITES, &counted.slice_writes)
    })
}

fn calls(encoder: &mut DescriptorEncoder<'_>, calls: &GrpcCalls) -> Result {
    let all = calls.counted();
    let labels = |method: &GrpcMethod| [method.sort, method.service, method.method];
    series(encoder, &table::GRPC_STARTED, |values| {
        all.iter()
            .try_for_each(|(method, metrics)| values.counter(&labels(method), metrics.started))
    })?;
    series(encoder, &table::GRPC_HANDLED, |values| {
        for (method, metrics) in &all {
            let [sort, service, name] = labels(method);
            for (code, count) in &metrics.handled {
                values.counter(&[sort, service, name, code], *count)?;
            }
        }
        Ok(())
    })?;
    series(encoder, &table::GRPC_HANDLING, |values| {
        all.iter()
            .try_for_each(|(method, metrics)| values.histogram(&labels(method), &metrics.handling))
    })
}
