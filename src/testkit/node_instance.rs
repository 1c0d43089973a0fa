//! A node driver instance under test, with the companion's calls.

use std::path::Path;
use std::sync::Arc;

use futures::StreamExt as _;
use tokio::time::timeout;

use super::fixture::{CheckResult, Fixture};
use super::instance::{Instance, Kit};
use super::process::polled;
use super::rule::Rule;
use crate::node::driver::{ContainerEdits, Device, NodeDriver, NodeDriverError, PreparedClaim};

/// Driver name on the test cluster.
pub(super) const DRIVER: &str = "conformance.example.com";

/// Vendor function that lists leftovers of claims in a directory.
pub(super) type LeftOver = Arc<dyn Fn(&Path) -> Vec<String> + Send + Sync>;

impl<D: NodeDriver> Kit<D> {
    /// Starts an instance and waits for its first device list, as the companion does.
    pub(super) async fn listening<'a>(&self, fixture: &'a Fixture) -> CheckResult<Instance<'a, D>> {
        let instance = self.instance(fixture).await?;
        instance.devices().await?;
        Ok(instance)
    }
}

impl<D: NodeDriver> Instance<'_, D> {
    /// Returns the first device list.
    pub(super) async fn devices(&self) -> CheckResult<Vec<Device>> {
        let driver = self.driver.clone();
        let first = async move { Box::pin(driver.devices()).next().await };
        let found = match timeout(self.limit, self.process.run(first)).await {
            Ok(Ok(Some(devices))) if !devices.is_empty() => {
                let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
                self.fixture.note(format!("devices -> [{}]", names.join(", ")));
                return Ok(devices);
            }
            Ok(Ok(Some(_))) => "an empty list".to_owned(),
            Ok(Ok(None)) => "the stream has ended".to_owned(),
            Ok(Err(failure)) => {
                let panic = format!("a panic: {failure}");
                return Err(self.broken(Rule::NoPanic, "devices", "a list", panic));
            }
            Err(_) => format!("nothing within {:?}", self.limit),
        };
        let expected = "a list of the devices of the test";
        Err(self.broken(Rule::FirstListComes, "devices", expected, found))
    }

    pub(super) async fn container_edits(
        &self,
        device: &str,
    ) -> CheckResult<Result<ContainerEdits, NodeDriverError>> {
        let (driver, name) = (self.driver.clone(), device.to_owned());
        let call = async move { driver.container_edits(&name).await };
        let what = format!("container_edits({device})");
        let answer = self.call(&what, call).await?;
        self.fixture.note(format!("{what} -> {}", shown(&answer)));
        Ok(answer)
    }

    pub(super) async fn prepare(
        &self,
        claim: &PreparedClaim,
    ) -> CheckResult<Result<ContainerEdits, NodeDriverError>> {
        let (driver, of) = (self.driver.clone(), claim.clone());
        let call = async move { driver.prepare(&of).await };
        let what = format!("prepare({})", described(claim));
        let answer = self.call(&what, call).await?;
        self.fixture.note(format!("{what} -> {}", shown(&answer)));
        Ok(answer)
    }

    /// Starts a prepare and drops the call after `polls` waits. Returns whether the call finished before.
    pub(super) async fn prepare_and_drop(&self, claim: &PreparedClaim, polls: usize) -> CheckResult<bool> {
        let (driver, of) = (self.driver.clone(), claim.clone());
        let call = async move { polled(driver.prepare(&of), polls).await.is_some() };
        let what = format!("prepare({})", described(claim));
        let done = self.call(&what, call).await?;
        let how = if done { "the answer is lost" } else { "dropped" };
        self.fixture.note(format!("{what} -> ({how}, {polls} waits)"));
        Ok(done)
    }

    /// Calls `unprepare`; an error breaks `rule`.
    pub(super) async fn unprepare(&self, claim: &PreparedClaim, rule: Rule, tried: &str) -> CheckResult<()> {
        let (driver, of) = (self.driver.clone(), claim.clone());
        let call = async move { driver.unprepare(&of).await };
        let what = format!("unprepare({})", described(claim));
        let answer = self.call(&what, call).await?;
        match answer {
            Ok(()) => {
                self.fixture.note(format!("{what} -> Ok"));
                Ok(())
            }
            Err(error) => Err(self.broken(rule, tried, "Ok", error.to_string())),
        }
    }

    /// Calls `prepare`; an error or unexpected container edits break `rule`.
    pub(super) async fn prepared(
        &self,
        claim: &PreparedClaim,
        before: Option<&ContainerEdits>,
        rule: Rule,
        tried: &str,
    ) -> CheckResult<ContainerEdits> {
        let expected = before.map_or_else(
            || "container edits, because the devices are listed as healthy".to_owned(),
            |before| format!("{before:?}, as before"),
        );
        match self.prepare(claim).await? {
            Ok(container_edits) if before.is_none_or(|before| *before == container_edits) => {
                Ok(container_edits)
            }
            Ok(container_edits) => Err(self.broken(rule, tried, expected, format!("{container_edits:?}"))),
            Err(error) => Err(self.broken(rule, tried, expected, error.to_string())),
        }
    }

    /// Checks that no claim has leftovers, as far as the vendor's function can tell.
    pub(super) fn nothing_left(&self, left_over: Option<&LeftOver>, tried: &str) -> CheckResult<()> {
        let left = left_over
            .map(|list| list(&self.fixture.driver_directory()))
            .unwrap_or_default();
        if left.is_empty() {
            return Ok(());
        }
        Err(self.broken(Rule::NothingIsLeft, tried, "nothing", format!("{left:?}")))
    }
}

pub(super) fn described(claim: &PreparedClaim) -> String {
    format!("{}: {}", claim.name, claim.devices.join(", "))
}

fn shown(answer: &Result<ContainerEdits, NodeDriverError>) -> String {
    match answer {
        Ok(container_edits) => {
            let nodes: Vec<&str> = container_edits
                .device_nodes
                .iter()
                .map(|node| node.container_path.as_str())
                .collect();
            format!("ok [{}]", nodes.join(", "))
        }
        Err(error) => format!("error {:?}: {error}", error.reason()),
    }
}
