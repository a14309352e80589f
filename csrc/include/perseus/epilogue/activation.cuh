// What does an expert compute between its two products? Gated activations on float32 sums, one function per kind.
//
// NaN must come out where NaN went in: comparisons here are written so that NaN falls through.
#pragma once

#include "perseus/common/config.cuh"

namespace perseus {

PERSEUS_D float sigmoid(float value) {
    constexpr float kMinusLog2E = -1.4426950408889634f;
    float power;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * kMinusLog2E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
}

template <Activation kAct>
PERSEUS_D float gated_activation(float gate, float up, float alpha, float limit) {
    if constexpr (kAct == Activation::kSilu) {
        return gate * sigmoid(gate) * up;
    } else if constexpr (kAct == Activation::kGelu) {
        return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    } else if constexpr (kAct == Activation::kGeluTanh) {
        // 0.5 * (1 + tanh(z)) = sigmoid(2z)
        const float z = 0.79788456080286536f * (gate + 0.044715f * gate * gate * gate);
        return gate * sigmoid(2.0f * z) * up;
    } else {
        const float g = gate > limit ? limit : gate;
        const float u = up > limit ? limit : (up < -limit ? -limit : up);
        return (u + 1.0f) * g * sigmoid(alpha * g);
    }
}

}  // namespace perseus
