//! Drivers that hang, panic or come late with their answers.

use std::time::Duration;

use drayman::controller::LeaderElection;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;

use crate::call::{What, count};
use crate::harness::rule;
use crate::objects::From;
use crate::script::Act;
use crate::stage::{is_allocated, names, on_stage, rules};

#[test]
fn a_hanging_call_is_cancelled_and_delays_only_its_claim() -> anyhow::Result<()> {
    on_stage("hangs", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { .. } if what.is_about("stuck") || what.is_about("at-once") => Act::Hang,
            _ => Act::Go,
        });
        let limit = Duration::from_secs(2);
        let controller = stage
            .start_as("", &stage.driver, &rules(), |builder| builder.call_timeout(limit))
            .await?;
        stage.claim("stuck").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("stuck"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage.immediate("at-once").await?;
        stage
            .driver
            .until("allocate both", |calls| count(calls, What::is_allocate) >= 2)
            .await?;
        for number in 0..20 {
            stage.immediate(&format!("other-{number}")).await?;
        }
        for number in 0..20 {
            stage
                .until_claim(&format!("other-{number}"), "allocated", is_allocated)
                .await?;
        }
        let about = |what: &What| what.is_about("stuck") || what.is_about("at-once");
        let calls = stage
            .driver
            .until("give back", |calls| {
                count(calls, |what| what.is_deallocate() && about(what)) >= 2
            })
            .await?;
        for call in calls
            .iter()
            .filter(|call| call.what.is_allocate() && about(&call.what))
        {
            if let Some(ended) = call.ended {
                assert!(ended - call.began >= limit * 9 / 10, "{:?}", ended - call.began);
            }
        }
        stage
            .event("pod", "DriverTimeout", "has not answered within 2s")
            .await?;
        stage
            .event("at-once", "DriverTimeout", "has not answered within 2s")
            .await?;
        stage.driver.behave();
        for name in ["stuck", "at-once"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        controller.end().await
    })
}

#[test]
fn every_kind_of_call_has_a_limit() -> anyhow::Result<()> {
    on_stage("limits", async |stage| {
        let limit = Duration::from_millis(500);
        let controller = stage
            .start_as("", &stage.driver, &rules(), |builder| builder.call_timeout(limit))
            .await?;
        stage.driver.rule(|what| {
            if matches!(what, What::Class(_)) {
                Act::Hang
            } else {
                Act::Go
            }
        });
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "", &names(["node"])).await?;
        stage.event("pod", "DriverTimeout", "has not answered").await?;
        stage.driver.rule(|what| {
            if matches!(what, What::Claim(_)) {
                Act::Hang
            } else {
                Act::Go
            }
        });
        stage
            .driver
            .until("read the claim twice", |calls| {
                count(calls, |what| matches!(what, What::Claim(_))) >= 2
            })
            .await?;
        stage
            .driver
            .rule(|what| if what.is_judge() { Act::Hang } else { Act::Go });
        stage
            .driver
            .until("judge twice", |calls| count(calls, What::is_judge) >= 2)
            .await?;
        stage.driver.behave();
        stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        stage.immediate("two").await?;
        stage.until_claim("two", "allocated", is_allocated).await?;
        stage
            .driver
            .rule(|what| if what.is_deallocate() { Act::Hang } else { Act::Go });
        stage.delete_claim("two").await?;
        stage.event("two", "DriverTimeout", "has not answered").await?;
        stage
            .driver
            .until("deallocate twice", |calls| count(calls, What::is_deallocate) >= 2)
            .await?;
        assert!(is_allocated(&stage.claims().get("two").await?));
        stage.driver.behave();
        stage.until_gone("two").await?;
        controller.end().await
    })
}

#[test]
fn a_driver_that_panics_harms_only_its_own_claim() -> anyhow::Result<()> {
    on_stage("panics", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { .. } if what.is_about("bad") => Act::Panic,
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        stage.immediate("bad").await?;
        stage.event("bad", "DriverPanicked", "panicked").await?;
        stage
            .driver
            .until("give back", |calls| count(calls, What::is_deallocate) >= 1)
            .await?;
        stage.immediate("good").await?;
        stage.until_claim("good", "allocated", is_allocated).await?;
        stage.driver.behave();
        stage.until_claim("bad", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn a_lease_is_released_only_when_every_call_has_ended() -> anyhow::Result<()> {
    on_stage("hands-over", async |stage| {
        let leases = Api::<Lease>::namespaced(stage.cluster.client(), &stage.name);
        let mut rights = rules();
        rights.push(rule(
            &["coordination.k8s.io"],
            &["leases"],
            &["get", "create", "update"],
        ));
        for (name, act, released) in [("hangs", false, false), ("ends", true, true)] {
            stage.driver.rule(move |what| match what {
                What::Allocate { .. } if !act => Act::Hang,
                _ => Act::Go,
            });
            let election = LeaderElection::new(&stage.name, name, "test");
            let identity = election.identity.clone();
            let controller = stage
                .start_as("", &stage.driver, &rights, |builder| {
                    builder
                        .request_timeout(Duration::from_secs(2))
                        .leader_election(Some(election))
                })
                .await?;
            let calls = count(&stage.driver.calls(), What::is_allocate);
            stage.immediate(name).await?;
            stage
                .driver
                .until("allocate", |all| count(all, What::is_allocate) > calls)
                .await?;
            if released {
                stage.until_claim(name, "allocated", is_allocated).await?;
            }
            controller.end().await?;
            let spec = leases.get(name).await?.spec.unwrap_or_default();
            let holder = if released { String::new() } else { identity };
            assert_eq!(spec.holder_identity, Some(holder), "{name}");
        }
        Ok(())
    })
}
