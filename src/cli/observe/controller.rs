//! The controller's metrics.

use std::collections::BTreeMap;
use std::fmt::Result;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::watch;

use super::encode::{count_each, number, series, with_all};
use super::reasons::By;
use super::{encode, table};
use crate::controller::Metrics;
use crate::core::claims::{Moment, QueueStatistics, Statistics};

/// Collector that reads the current statistics at each scrape.
#[derive(Debug)]
pub(super) struct ControllerMetrics {
    pub(super) driver_name: String,
    pub(super) metrics: watch::Receiver<Metrics>,
    pub(super) leads: watch::Receiver<bool>,
}

impl Collector for ControllerMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result {
        let Metrics {
            since, statistics, ..
        } = self.metrics.borrow().clone();
        let leads = *self.leads.borrow();
        series(&mut encoder, &table::LEADER, |values| {
            values.gauge(&[&self.driver_name], f64::from(u8::from(leads)))
        })?;
        claims(&mut encoder, &statistics)?;
        pods(&mut encoder, &statistics)?;
        encode::events(&mut encoder, By::Controller, &statistics.reports)?;
        queues(&mut encoder, &statistics.queues, Moment::new(since.elapsed()))
    }
}

fn claims(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result {
    series(encoder, &table::ALLOCATED, |values| {
        values.counter(&[], statistics.allocations)
    })?;
    series(encoder, &table::RELEASED, |values| {
        values.counter(&[], statistics.deallocations)
    })?;
    series(encoder, &table::ATTEMPTS, |values| {
        count_each(values, &Statistics::ATTEMPTS, &statistics.attempts)
    })?;
    series(encoder, &table::DRIVER_CALLS, |values| {
        for call in Statistics::CALLS {
            for result in Statistics::CALL_RESULTS {
                let count = statistics.calls.get(&(call, result));
                values.counter(&[call, result], count.copied().unwrap_or_default())?;
            }
        }
        Ok(())
    })
}

fn pods(encoder: &mut DescriptorEncoder<'_>, statistics: &Statistics) -> Result {
    series(encoder, &table::WAITING, |values| {
        for (reason, count) in with_all(&table::waiting(), &statistics.waiting) {
            values.gauge(&[reason], number(count))?;
        }
        Ok(())
    })?;
    series(encoder, &table::WAKE_UPS, |values| {
        values.histogram(&[], &statistics.wake_ups)
    })?;
    series(encoder, &table::RECHECK, |values| {
        values.counter(&[], statistics.caught_by_recheck)
    })
}

fn queues(
    encoder: &mut DescriptorEncoder<'_>,
    queues: &BTreeMap<&'static str, QueueStatistics>,
    now: Moment,
) -> Result {
    let each = Statistics::QUEUES.map(|name| (name, queues.get(name).copied().unwrap_or_default()));
    series(encoder, &table::QUEUE_DEPTH, |values| {
        each.iter()
            .try_for_each(|(name, queue)| values.gauge(&[name], number(queue.depth)))
    })?;
    series(encoder, &table::QUEUE_ADDS, |values| {
        each.iter()
            .try_for_each(|(name, queue)| values.counter(&[name], queue.adds))
    })?;
    series(encoder, &table::QUEUE_WAITED, |values| {
        each.iter()
            .try_for_each(|(name, queue)| values.histogram(&[name], &queue.waited))
    })?;
    series(encoder, &table::QUEUE_WORKED, |values| {
        each.iter()
            .try_for_each(|(name, queue)| values.histogram(&[name], &queue.worked))
    })?;
    series(encoder, &table::QUEUE_UNFINISHED, |values| {
        each.iter()
            .try_for_each(|(name, queue)| values.gauge(&[name], unfinished(queue, now).as_secs_f64()))
    })?;
    series(encoder, &table::QUEUE_LONGEST, |values| {
        each.iter().try_for_each(|(name, queue)| {
            let longest = queue.oldest.map(|begun| now.since(begun));
            values.gauge(&[name], longest.unwrap_or_default().as_secs_f64())
        })
    })?;
    series(encoder, &table::QUEUE_RETRIES, |values| {
        each.iter()
            .try_for_each(|(name, queue)| values.counter(&[name], queue.retries))
    })
}

/// Returns the total time that unfinished work has taken so far.
fn unfinished(queue: &QueueStatistics, now: Moment) -> Duration {
    let number = u32::try_from(queue.under_way).unwrap_or(u32::MAX);
    now.since_start()
        .saturating_mul(number)
        .saturating_sub(queue.begun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_time_grows_until_the_scrape() {
        let at = |seconds| Moment::new(Duration::from_secs(seconds));
        let queue = QueueStatistics {
            under_way: 2,
            begun: Duration::from_secs(10 + 13),
            oldest: Some(at(10)),
            ..QueueStatistics::default()
        };
        assert_eq!(unfinished(&queue, at(15)), Duration::from_secs(5 + 2));
        assert_eq!(unfinished(&QueueStatistics::default(), at(15)), Duration::ZERO);
    }
}
