//! The registration service that kubelet's plugin watcher calls (pluginregistration v1).

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::KubeletApiState;
use crate::api::proto::plugin_registration::registration_server::Registration;
use crate::api::proto::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

/// Characters of kubelet's rejection message that are kept and logged.
const MAX_REASON: usize = 1024;

/// Reports the plugin's identity to kubelet and records the registration status.
#[derive(Debug)]
pub(super) struct RegistrationService {
    pub(super) info: PluginInfo,
    pub(super) state: watch::Sender<KubeletApiState>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        tracing::debug!(plugin = self.info.name, "kubelet requests the plugin's identity");
        Ok(Response::new(self.info.clone()))
    }

    /// Never returns an error: up to 1.35, kubelet would then keep the plugin as known but not registered.
    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus {
            plugin_registered,
            error,
        } = request.into_inner();
        let plugin = &self.info.name;
        if plugin_registered {
            tracing::info!(plugin, "kubelet has registered the driver");
            self.state.send_replace(KubeletApiState::Registered);
        } else {
            let message = error.chars().take(MAX_REASON).collect::<String>();
            tracing::error!(
                plugin,
                reason = "RegistrationRejected",
                "kubelet rejects the driver: {message:?}; \"no handler registered\" means that its feature gate DynamicResourceAllocation is off"
            );
            self.state.send_replace(KubeletApiState::Rejected { message });
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn service() -> (RegistrationService, watch::Receiver<KubeletApiState>) {
        let (state, receiver) = watch::channel(KubeletApiState::Waiting);
        let info = PluginInfo {
            r#type: "DRAPlugin".into(),
            name: "d.dev".into(),
            endpoint: "/p/d.sock".into(),
            supported_versions: vec!["1.0.0".into()],
        };
        (RegistrationService { info, state }, receiver)
    }

    #[tokio::test]
    async fn the_answer_has_the_bytes_that_kubelet_reads() {
        let info = service()
            .0
            .get_info(Request::new(InfoRequest {}))
            .await
            .unwrap()
            .into_inner();
        let golden = b"\x0a\x09DRAPlugin\x12\x05d.dev\x1a\x09/p/d.sock\x22\x051.0.0";
        assert_eq!(info.encode_to_vec(), golden);
    }

    #[tokio::test]
    async fn the_registration_status_is_stored_and_never_refused() {
        let (service, state) = service();
        let notify = async |plugin_registered, error: &str| {
            let status = RegistrationStatus {
                plugin_registered,
                error: error.into(),
            };
            let answer = service
                .notify_registration_status(Request::new(status))
                .await
                .unwrap();
            assert!(answer.into_inner().encode_to_vec().is_empty());
            state.borrow().clone()
        };
        assert_eq!(
            notify(false, "no handler").await,
            KubeletApiState::Rejected {
                message: "no handler".into()
            }
        );
        assert_eq!(notify(true, "").await, KubeletApiState::Registered);
        let KubeletApiState::Rejected { message } = notify(false, &"é".repeat(5000)).await else {
            panic!("rejected")
        };
        assert_eq!(message.chars().count(), MAX_REASON);
    }
}
