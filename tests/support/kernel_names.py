"""Names of GPU kernels as CUPTI reports them in training steps, with the kind that each computes."""

from __future__ import annotations

ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, "
    "(at::native::(anonymous namespace)::ADAM_MODE)1, false>, float const*, double, double, double, double, double>"
)
CE_FORWARD = "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>"
CE_BACKWARD = "void at::native::(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float, long>"

KINDS_OF_NAMES = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "matmul",
    "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_bias_TNN": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x4_nn_align8>": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>": "matmul",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float>": "matmul",
    "ampere_sgemm_128x64_tn": "matmul",
    "triton_tem_fused_addmm_gelu_4": "matmul",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<> > >": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false> >": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >": "attention",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8> >": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_kernel0_0": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x64_kernel0_0": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)": "attention",
    "triton_tem_fused_flex_attention_2": "attention",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_kernel__5x_cudnn": "convolution",
    "sm80_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_kernel": "convolution",
    "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_kernel": "convolution",
    "void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>": "convolution",
    "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false, false, true>": "convolution",
    "cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128_32x5_nhwc>": "convolution",
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>": "depthwise",
    "void at::native::(anonymous namespace)::conv_depthwise2d_grad_weight_kernel<float, int>": "depthwise",
    "void dgrad2d_grouped_direct_kernel<__nv_bfloat16, __nv_bfloat16, float, true, false>": "depthwise",
    "triton_poi_fused_add_gelu_native_layer_norm_3": "memory",
    "triton_per_fused__to_copy_native_layer_norm_backward_12": "memory",
    "triton_red_fused_addmm_sum_7": "memory",
    "triton_poi_fused_convolution_native_batch_norm_0": "memory",
    "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>": "memory",
    "void cudnn::bn_bw_1C11_kernel_new<__nv_bfloat16, float, float2, 512, true, 1>": "memory",
    "add_kernel": "memory",
    "Memcpy DtoD (Device -> Device)": "memory",
    "Memset (Device)": "memory",
    CE_FORWARD: "memory",
    CE_BACKWARD: "memory",
    ELEMENTWISE: "memory",
    ADAM: "optimizer",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
}
